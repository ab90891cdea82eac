"""Reading checkpoints: every container and nesting, mapped not copied, and every bad file."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import resource
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_diag.checkpoints import (
    load_drafter,
    read_checkpoint,
    resolve_convention,
)
from dflash_diag.checkpoints.names import clean_name
from dflash_diag.checkpoints.quantised import dequantised
from dflash_diag.checkpoints.torchzip import TorchZip
from dflash_diag.errors import CheckpointError

H, HEADS, KV, D, MLP, LAYERS, TAPS = 16, 4, 2, 8, 24, 2, 3
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "intermediate_size": MLP,
    "rms_norm_eps": 1e-6,
    "vocab_size": 50,
    "num_target_layers": 6,
    "block_size": 4,
    "rope_theta": 10000.0,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 4]},
}


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """A drafter's state dict, written down by hand."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, TAPS * H), "hidden_norm.weight": (H,)}
    for i in range(LAYERS):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {
            f"{attention}q_proj.weight": (HEADS * D, H),
            f"{attention}k_proj.weight": (KV * D, H),
            f"{attention}v_proj.weight": (KV * D, H),
            f"{attention}o_proj.weight": (H, HEADS * D),
            f"{attention}q_norm.weight": (D,),
            f"{attention}k_norm.weight": (D,),
            f"{mlp}gate_proj.weight": (MLP, H),
            f"{mlp}up_proj.weight": (MLP, H),
            f"{mlp}down_proj.weight": (H, MLP),
            f"layers.{i}.input_layernorm.weight": (H,),
            f"layers.{i}.post_attention_layernorm.weight": (H,),
        }
    shapes["norm.weight"] = (H,)
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def write_folder(folder: Path, weights: dict[str, Tensor] | None = None, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder


def write_raw(folder: Path, content, name: str = "checkpoint.pt", config=CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    torch.save(content, folder / name)
    return folder / name


def assert_same(read, expected: dict[str, Tensor]) -> None:
    assert set(read) == set(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor), name


# --- containers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_folder_and_its_file_and_a_given_config(tmp_path, dtype):
    weights = tensors(dtype)
    folder = write_folder(tmp_path / "a", weights)
    (folder / "training_args.json").write_text('{"lr": 0.001}')
    for path in (folder, folder / "model.safetensors", str(folder)):
        checkpoint = read_checkpoint(path)
        assert checkpoint.kind == "safetensors"
        assert checkpoint.config == CONFIG
        assert checkpoint.training_args == {"lr": 0.001}
        assert_same(checkpoint.tensors, weights)
    lone = tmp_path / "drafter.safetensors"
    shutil.copy(folder / "model.safetensors", lone)
    for config in (CONFIG, folder / "config.json", str(folder)):
        assert_same(read_checkpoint(lone, config=config).tensors, weights)


def test_shards(tmp_path):
    weights = tensors()
    names = list(weights)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    for file, held in parts.items():
        save_file({n: weights[n] for n in held}, folder / file)
    index = {"weight_map": {n: f for f, held in parts.items() for n in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = read_checkpoint(folder)
    assert_same(checkpoint.tensors, weights)
    assert set(checkpoint.files) == {"config.json", *parts}
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-2\.safetensors"):
        read_checkpoint(folder)
    index["weight_map"]["x"] = "../../etc/passwd"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no usable shards"):
        read_checkpoint(folder)


PREFIXES = [
    "",
    "module.",
    "_orig_mod.",
    "draft_model.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "module.draft_model.",
    "_orig_mod.draft_model.module.",
    "dflash_module.",
    "model.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("nest", [None, "model", "state_dict", "draft_state_dict", "module"])
def test_raw_files_of_every_nesting_and_wrapper(tmp_path, prefix, nest):
    weights = tensors(torch.bfloat16)
    stored = {prefix + n: t for n, t in weights.items()}
    path = write_raw(tmp_path, {nest: stored, "step": 7} if nest else stored)
    checkpoint = read_checkpoint(path)
    assert checkpoint.kind == "raw"
    assert_same(checkpoint.tensors, weights)
    if nest:
        assert checkpoint.extra["step"] == 7
        assert checkpoint.extra["state_dict_at"] == nest


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt"])
def test_any_file_name_and_a_folder_with_one_training_file(tmp_path, suffix):
    path = write_raw(tmp_path, {"model": tensors()}, f"last.{suffix}")
    assert_same(read_checkpoint(path).tensors, tensors())
    if suffix != "ckpt":
        torch.save({"state": {}}, tmp_path / "optimizer.pt")
        torch.save({"args": 1}, tmp_path / "training_args.bin")
        torch.save({"cpu": 1}, tmp_path / "rng_state_0.pth")
        assert_same(read_checkpoint(tmp_path).tensors, tensors())


def test_wrappers_inside_names_and_double_nesting(tmp_path):
    weights = tensors()
    stored = {
        "module.draft_model." + n.replace("layers.0.", "layers.0._orig_mod."): t
        for n, t in weights.items()
    }
    path = write_raw(tmp_path, {"state_dict": {"model": stored}})
    assert_same(read_checkpoint(path).tensors, weights)
    assert clean_name("layers.1._fsdp_wrapped_module.mlp.up_proj.weight") == (
        "layers.1.mlp.up_proj.weight"
    )
    assert clean_name("module_list.fc.weight") == "module_list.fc.weight"


def test_a_target_saved_beside_the_drafter_is_set_aside(tmp_path):
    stored = {f"draft_model.{n}": t for n, t in tensors().items()}
    stored |= {
        "target_model.embed_tokens.weight": torch.zeros(50, H),
        "lm_head.weight": torch.ones(2),
    }
    checkpoint = read_checkpoint(write_raw(tmp_path, {"model": stored}))
    assert_same(checkpoint.tensors, tensors())
    assert checkpoint.extra["set_aside"] == ["target_model.embed_tokens.weight", "lm_head.weight"]


def test_the_drafter_is_preferred_to_its_average_and_to_the_optimizer(tmp_path):
    weights, average = tensors(seed=1), tensors(seed=2)
    optimizer = {"state": {n: {"exp_avg": t} for n, t in average.items()}}
    path = write_raw(tmp_path, {"ema": average, "optimizer": optimizer, "model": weights})
    assert_same(read_checkpoint(path).tensors, weights)
    path = write_raw(tmp_path, {"ema": average, "mean": weights})
    with pytest.raises(CheckpointError, match=r"several drafters \(ema, mean\)"):
        read_checkpoint(path)
    path = write_raw(tmp_path, {"student": weights})
    assert_same(read_checkpoint(path).tensors, weights)


def test_two_names_for_one_tensor_are_refused(tmp_path):
    path = write_raw(tmp_path, tensors() | {"module.fc.weight": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"both fc\.weight and module\.fc\.weight"):
        read_checkpoint(path)


def test_config_given_inside_or_beside_in_this_order(tmp_path):
    inside = CONFIG | {"block_size": 5}
    given = CONFIG | {"block_size": 6}
    for value in (inside, argparse.Namespace(**inside), json.dumps(inside)):
        path = write_raw(tmp_path, {"model": tensors(), "config": value})
        assert read_checkpoint(path).config == inside
        assert read_checkpoint(path).config_source.endswith("checkpoint.pt#config")
        assert read_checkpoint(path, config=given).config == given
    path = write_raw(tmp_path, {"model": tensors(), "config": {"lr": 1.0}})
    assert read_checkpoint(path).config == CONFIG
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no configuration.*beside it or inside it"):
        read_checkpoint(path)


def test_training_arguments_inside_and_beside(tmp_path):
    args = argparse.Namespace(
        lr=np.float64(3e-4), out=pathlib.Path("/runs/1"), taps=[1, 2], n=np.int64(4), note=None
    )
    plain = {"lr": 3e-4, "out": "/runs/1", "taps": [1, 2], "n": 4, "note": None}
    for key in ("args", "hyper", "anything"):
        path = write_raw(tmp_path, {"model": tensors(), key: args, "epoch": 2})
        assert read_checkpoint(path).training_args == plain
        assert read_checkpoint(path).extra["epoch"] == 2
    path = write_raw(tmp_path, {"model": tensors(), "args": {"lr": 1.0}})
    assert read_checkpoint(path).training_args == {"lr": 1.0}
    path = write_raw(tmp_path, {"model": tensors()})
    assert read_checkpoint(path).training_args is None
    (tmp_path / "training_args.json").write_text('{"seed": 1}')
    assert read_checkpoint(path).training_args == {"seed": 1}


def test_a_real_training_checkpoint(tmp_path):
    """Model, optimizer after a step, scheduler, random states, step and arguments."""
    model = torch.nn.ParameterDict(
        {n.replace(".", "/"): torch.nn.Parameter(t) for n, t in tensors().items()}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    sum(p.square().sum() for p in model.values()).backward()
    optimizer.step()
    scheduler.step()
    state = collections.OrderedDict(
        (n.replace("/", "."), p) for n, p in model.items()
    )  # parameters, as some trainers save them
    path = write_raw(
        tmp_path,
        {
            "model": state,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "step": 1,
            "rng": {"torch": torch.get_rng_state(), "numpy": np.random.RandomState(0).get_state()},
            "args": argparse.Namespace(lr=1e-3),
            "losses": [np.float32(1.5)],
        },
    )
    checkpoint = read_checkpoint(path)
    assert_same(checkpoint.tensors, {n: p.detach() for n, p in state.items()})
    assert checkpoint.training_args == {"lr": 1e-3}
    load_drafter(checkpoint, resolve_convention(checkpoint))


# --- mapping ------------------------------------------------------------------------------------


def _maps_file(tensor: Tensor, path: Path) -> bool:
    """Whether the tensor's memory is a mapping of the file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.endswith(str(path))
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", ["safetensors", "raw"])
def test_weights_are_mapped_not_copied_all_the_way_into_the_drafter(tmp_path, kind):
    weights = tensors(torch.bfloat16)
    if kind == "raw":
        path = file = write_raw(tmp_path, {"model": weights})
    else:
        path = write_folder(tmp_path, weights)
        file = path / "model.safetensors"
    before = file.read_bytes()
    checkpoint = read_checkpoint(path)
    assert _maps_file(checkpoint.tensors["fc.weight"], file)
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint), dtype=torch.bfloat16)
    for parameter in drafter.parameters():
        assert _maps_file(parameter, file)
    with torch.no_grad():
        drafter.fc.weight.fill_(7.0)
    assert file.read_bytes() == before
    assert torch.equal(read_checkpoint(path).tensors["fc.weight"], weights["fc.weight"])


def _grow(path: Path, entry: str, size: int) -> None:
    """Add a stored entry of ``size`` bytes to a zip without writing them: a hole in the file."""
    with path.open("r+b") as file, zipfile.ZipFile(file, "a") as archive:
        info = zipfile.ZipInfo(entry)
        info.file_size = info.compress_size = size
        info.CRC = 0xDEADBEEF
        info.header_offset = archive.start_dir
        file.seek(archive.start_dir)
        file.write(info.FileHeader(zip64=True))
        file.seek(size, 1)
        archive.start_dir = file.tell()
        archive.filelist.append(info)
        archive.NameToInfo[entry] = info
        archive._didModify = True


def test_an_optimizer_of_17_gigabytes_is_never_read(tmp_path):
    weights = tensors(torch.bfloat16)
    huge = 17 * 10**9
    moment = torch.zeros(1, dtype=torch.float32)
    path = write_raw(tmp_path, {"model": weights, "optimizer": {"state": {0: {"exp_avg": moment}}}})
    _swap_in_a_huge_storage(path, moment, huge)
    assert path.stat().st_size > huge
    assert path.stat().st_blocks * 512 < 10**6
    read_before = _bytes_read()
    faults_before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint = read_checkpoint(path)
    load_drafter(checkpoint, resolve_convention(checkpoint), dtype=torch.bfloat16)
    assert set(checkpoint.files) == {"config.json", "checkpoint.pt#weights"}
    assert_same(checkpoint.tensors, weights)
    # Reading or mapping it would fault in 4 million pages and grow the process by 17 GB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before < 50_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 200_000
    assert _bytes_read() - read_before < 10**7


def _swap_in_a_huge_storage(path: Path, small: Tensor, size: int) -> None:
    """Give the last stored array, the optimizer's, its real size."""
    with zipfile.ZipFile(path) as archive:
        entries = {i.filename: archive.read(i) for i in archive.infolist()}
    last = max((n for n in entries if "/data/" in n and "/.data" not in n),
               key=lambda n: int(n.rsplit("/", 1)[1]))  # fmt: skip
    assert len(entries[last]) == small.nbytes
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            if name != last:
                archive.writestr(name, data)
    _grow(path, last, size)


def _bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    io = Path("/proc/self/io")
    return int(io.read_text().split("rchar: ")[1].split()[0]) if io.exists() else 0


def test_tied_shared_and_strided_tensors(tmp_path):
    """Views keep their strides and offsets, and what shared memory shares it again."""
    weights = tensors()
    big = torch.randn(4, 3 * H, H)
    weights["fc.weight"] = torch.randn(TAPS * H, H).T  # transposed
    weights["layers.0.mlp.gate_proj.weight"] = big[1, :MLP]  # an offset into a larger storage
    weights["layers.1.mlp.gate_proj.weight"] = weights["layers.0.mlp.gate_proj.weight"]  # tied
    weights["hidden_norm.weight"] = torch.randn(H, 5)[:, 2]  # strided
    weights["norm.weight"] = torch.randn(1).expand(H)  # stride 0
    checkpoint = read_checkpoint(write_raw(tmp_path, weights))
    assert_same(checkpoint.tensors, weights)
    read = checkpoint.tensors
    for name in ("fc.weight", "hidden_norm.weight", "norm.weight"):
        assert read[name].stride() == weights[name].stride()
    tied = [f"layers.{i}.mlp.gate_proj.weight" for i in range(2)]
    assert read[tied[0]].data_ptr() == read[tied[1]].data_ptr()
    read[tied[0]][0, 0] = 99.0
    assert read[tied[1]][0, 0] == 99.0
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint))
    assert torch.equal(drafter.fc.weight, weights["fc.weight"])


def test_a_repacked_zip_whose_arrays_are_not_aligned(tmp_path):
    path = write_raw(tmp_path, tensors())
    with zipfile.ZipFile(path) as archive:
        entries = {i.filename: archive.read(i) for i in archive.infolist()}
    odd = 0
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
            odd += archive.start_dir % 4 != 0
    assert odd
    assert_same(read_checkpoint(path).tensors, tensors())


def write_shards(folder: Path, weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names, files = sorted(weights), ("model-1-of-2.safetensors", "model-2-of-2.safetensors")
    for at, file in enumerate(files):
        save_file({name: weights[name] for name in names[at::2]}, folder / file)
    where = {name: files[at % 2] for at, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


CONTAINERS = {"one file": write_folder, "shards": write_shards, "training file": write_raw}


@pytest.mark.parametrize("write", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_container_and_type_of_weights_is_loaded(tmp_path, write, dtype):
    weights = tensors(dtype)
    checkpoint = read_checkpoint(write(tmp_path / "d", weights))
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint))
    for name, parameter in drafter.named_parameters():
        assert parameter.dtype == dtype
        assert torch.equal(parameter, weights[name])


def quantise(weights: dict[str, Tensor], suffix: str, shape) -> dict[str, Tensor]:
    """The matrices of a state dict in 8-bit floats, each with a scale of some shape beside it."""
    made = {}
    for name, one in weights.items():
        made[name] = one
        if one.ndim == 2:
            by_row = one.float().abs().amax(1, keepdim=True) / 448
            scale = by_row if shape == "rows" else by_row.amax().reshape(shape)
            made[name] = (one.float() / scale).to(torch.float8_e4m3fn)
            made[name.replace("weight", suffix)] = scale
            made[name.replace("weight", "input_scale")] = torch.ones(())
    return made


@pytest.mark.parametrize("write", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize(
    ("suffix", "shape"),
    [("weight_scale_inv", (1, 1)), ("weight_scale", ()), ("weight_scale", "rows")],
)
def test_8_bit_floats_are_what_their_scales_make_of_them(tmp_path, write, suffix, shape):
    weights = tensors()
    stored = quantise(weights, suffix, shape)
    checkpoint = read_checkpoint(write(tmp_path / "d", stored))
    assert set(checkpoint.tensors) == set(weights)
    assert set(checkpoint.tensors.quantised) == {n for n, t in weights.items() if t.ndim == 2}
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint), dtype=torch.float32)
    for name, parameter in drafter.named_parameters():
        error = (parameter - weights[name]).abs().max() / weights[name].abs().max()
        assert error < 0.04, name
        if name in checkpoint.tensors.quantised:
            scale = stored[name.replace("weight", suffix)]
            wanted = (stored[name].float() * scale.reshape(-1, 1)).to(torch.bfloat16)
            assert torch.equal(parameter, wanted.float())
    twin = read_checkpoint(write_folder(tmp_path / "twin", dict(checkpoint.tensors)))
    assert twin.weights_sha256 == checkpoint.weights_sha256


def test_scales_of_blocks():
    values = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2)
    made = dequantised("fc.weight", values, scale)
    for at in ((0, 0), (127, 127), (128, 127), (127, 128), (299, 199), (256, 0)):
        factor = scale[at[0] // 128, at[1] // 128]
        assert made[at] == (values[at].float() * factor).to(torch.bfloat16)
    for wrong in (torch.rand(2, 2), torch.rand(200), torch.ones(3, 2, dtype=torch.int32)):
        with pytest.raises(CheckpointError, match="scale"):
            dequantised("fc.weight", values, wrong)


def test_8_bit_floats_without_a_scale_are_what_they_say(tmp_path):
    weights = {name: one.to(torch.float8_e5m2) for name, one in tensors().items()}
    checkpoint = read_checkpoint(write_folder(tmp_path, weights))
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint))
    assert drafter.fc.weight.dtype == torch.bfloat16
    assert torch.equal(drafter.fc.weight.float(), weights["fc.weight"].float())


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs /proc and posix_fadvise")
@pytest.mark.parametrize("write", CONTAINERS.values(), ids=CONTAINERS)
def test_a_checkpoint_is_read_once(tmp_path, write):
    """Audited, hashed, checked and loaded: its bytes come from the disk once."""
    weights = tensors()
    wide = 2**16
    for i in range(LAYERS):
        for name, shape in (
            ("gate_proj", (wide, H)),
            ("up_proj", (wide, H)),
            ("down_proj", (H, wide)),
        ):
            weights[f"layers.{i}.mlp.{name}.weight"] = torch.randn(shape)
    size = sum(one.nbytes for one in weights.values())
    path = write(tmp_path / "d", weights)
    settings = path.parent / "config.json" if path.is_file() else path / "config.json"
    settings.write_text(json.dumps(CONFIG | {"intermediate_size": wide}))
    for file in (tmp_path / "d").iterdir():
        with file.open("rb") as one:
            os.fsync(one.fileno())
            os.posix_fadvise(one.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    called, fetched = _bytes_read(), _bytes_fetched()
    checkpoint = read_checkpoint(path)
    assert checkpoint.weights_sha256
    assert checkpoint.files
    load_drafter(checkpoint, resolve_convention(checkpoint), dtype=torch.bfloat16)
    assert _bytes_read() - called < 1.1 * size
    assert _bytes_fetched() - fetched < 1.5 * size  # what is read ahead may be of the next file


def _bytes_fetched() -> int:
    """Bytes that a disk had to give this process."""
    return int(Path("/proc/self/io").read_text().split("\nread_bytes: ")[1].split()[0])


def test_other_dtypes_and_untyped_storages(tmp_path):
    extra = {
        "a": torch.arange(4),
        "b": torch.tensor([True, False]),
        "c": torch.randn(2, dtype=torch.float64),
        "d": torch.randn(4).to(torch.float8_e4m3fn),  # read as the bfloat16 that it equals
        "e": torch.arange(3).to(torch.uint16),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }
    checkpoint = read_checkpoint(write_raw(tmp_path, tensors() | extra))
    for name, tensor in extra.items():
        dtype = torch.bfloat16 if name == "d" else tensor.dtype
        assert checkpoint.tensors[name].dtype == dtype
        assert torch.equal(checkpoint.tensors[name].double(), tensor.double()), name


def test_a_file_replaced_while_it_is_open_stays_what_it_was(tmp_path):
    path = write_raw(tmp_path, tensors(seed=1))
    checkpoint = read_checkpoint(path)
    torch.save(tensors(seed=2), tmp_path / "next.pt")
    (tmp_path / "next.pt").replace(path)
    assert_same(checkpoint.tensors, tensors(seed=1))


def test_identity_of_weights_is_independent_of_the_file(tmp_path):
    one = read_checkpoint(write_folder(tmp_path / "a"))
    two = read_checkpoint(write_raw(tmp_path / "b", {"model": tensors()}))
    other = read_checkpoint(write_folder(tmp_path / "c", tensors(seed=1)))
    assert one.weights_sha256 == two.weights_sha256 != other.weights_sha256
    assert one.files["model.safetensors"] != other.files["model.safetensors"]
    assert one.files["config.json"] == other.files["config.json"]


# --- bad files ----------------------------------------------------------------------------------


def refused(path, match: str, **kwargs) -> str:
    """`read_checkpoint` refuses with one clear line."""
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint = read_checkpoint(path, **kwargs)
        load_drafter(checkpoint, resolve_convention(checkpoint))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_no_such_file(tmp_path):
    refused(tmp_path / "absent", "no such file or folder")
    refused(tmp_path / "absent.pt", "no such file or folder")
    folder = write_folder(tmp_path / "a")
    refused(folder, "no such file", config=tmp_path / "absent.json")


def test_folders_that_are_no_checkpoint(tmp_path):
    refused(tmp_path, "not a checkpoint: it holds nothing")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path, r"not a checkpoint: it holds config\.json, notes\.txt")
    refused(tmp_path / "config.json", "holds no weights; expected a checkpoint; name its folder")
    for name in ("a.pt", "b.pt"):
        torch.save({}, tmp_path / name)
    refused(tmp_path, r"several files.*a\.pt, b\.pt")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is empty"),
        (b"hello, I am a text file\n", "is not a checkpoint"),
        (bytes(range(256)) * 40, "is not a checkpoint"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "is not a checkpoint"),
        (b"\x80\x04K\x01.", "is a plain pickle"),
        (b"PK\x03\x04" + b"\0" * 200, "no complete zip"),
        (b"PK\x05\x06" + b"\0" * 18, "not a checkpoint"),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path, content, match):
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    refused(path, match, config=CONFIG)


def test_every_kind_of_truncated_file(tmp_path):
    folder = write_folder(tmp_path / "a")
    raw = write_raw(tmp_path / "b", {"model": tensors()})
    for file in (folder / "model.safetensors", raw):
        whole = file.read_bytes()
        for length in (1, 3, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            refused(file, "truncated or corrupted|no complete zip|not a checkpoint")
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, "truncated or corrupted")


def test_corrupted_safetensors_and_a_pointer_file(tmp_path):
    folder = write_folder(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:8] + b"?" + whole[9:])
    refused(folder, "truncated or corrupted")
    file.write_bytes(b"\xff" * 8 + whole[8:])
    refused(folder, "truncated or corrupted")
    file.write_bytes(whole + b"more")
    refused(folder, "truncated or corrupted")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(folder, "Git LFS pointer")


def test_any_flipped_byte_of_a_training_file_is_noticed_or_harmless(tmp_path):
    """Directory, headers, pickle or arrays: an error of ours, or a change outside the drafter."""
    path = write_raw(tmp_path, {"model": tensors(), "pad": torch.zeros(64)})
    whole = path.read_bytes()
    generator = np.random.default_rng(0)
    noticed = 0
    for _ in range(150):
        damaged = bytearray(whole)
        at = int(generator.integers(len(whole)))
        damaged[at] ^= 1 << int(generator.integers(8))
        path.write_bytes(bytes(damaged))
        try:
            checkpoint = read_checkpoint(path)
            load_drafter(checkpoint, resolve_convention(checkpoint))
        except CheckpointError:
            noticed += 1
        else:
            assert_same(checkpoint.tensors, tensors())
    assert noticed > 50


def test_a_damaged_array_is_found_by_its_checksum(tmp_path):
    weights = tensors()
    path = write_raw(tmp_path, weights)
    whole = bytearray(path.read_bytes())
    at = bytes(whole).find(weights["fc.weight"].numpy().tobytes())
    whole[at + 5] ^= 1
    path.write_bytes(bytes(whole))
    refused(path, "differs from its checksum")
    torch.serialization.set_crc32_options(False)
    try:
        write_raw(tmp_path, weights)
    finally:
        torch.serialization.set_crc32_options(True)
    checkpoint = read_checkpoint(path)
    load_drafter(checkpoint, resolve_convention(checkpoint))


def test_old_torch_files_get_a_clear_message(tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"model": tensors()}, path, _use_new_zipfile_serialization=False)
    refused(path, r"torch before 1\.6.*re-save it", config=CONFIG)


def test_zips_that_are_no_state_dict(tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "x")
    refused(path, r"zip file of notes\.txt", config=CONFIG)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"}.")
    refused(path, "compressed or encrypted", config=CONFIG)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"}.")
        archive.writestr("b/data.pkl", b"}.")
    refused(path, "expected one data.pkl", config=CONFIG)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"}.")
        archive.writestr("a/code/m.py", b"")
    refused(path, "TorchScript", config=CONFIG)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"}.")
        archive.writestr("a/byteorder", b"big")
    refused(path, "byte order", config=CONFIG)
    refused(write_raw(tmp_path, {"step": 1, "loss": 2.0}), r"no drafter \(its keys: step, loss\)")
    refused(write_raw(tmp_path, [1, 2]), "no drafter.*list")
    refused(write_raw(tmp_path, torch.nn.Linear(2, 2)), "whole torch.nn.modules.linear.Linear")


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1 << 40},
        {"offset": 1},
        {"size": (5,)},
        {"size": (2, 2), "stride": (1 << 40, 1)},
        {"size": (3, 2), "stride": (2, 1)},
        {"size": (1 << 50,), "stride": (0,)},
        {"dtype": "float64"},
        {"storage": {"numel": 5}},
        {"storage": {"key": "7"}},
        {"storage": {"key": "../../data.pkl"}},
        {"storage": {"dtype": "quint8"}, "dtype": "quint8"},
        {"dtype": "nonsense"},
        {"dtype": "load"},
    ],
)
def test_views_outside_their_array_are_refused(tmp_path, change):
    file = TorchZip(write_raw(tmp_path, {"x": torch.arange(4.0)}))
    ref = file.content["x"]
    assert torch.equal(file.tensor(ref), torch.arange(4.0))
    storage = dataclasses.replace(ref.storage, **change.pop("storage", {}))
    with pytest.raises(CheckpointError, match="damaged|holds .* values|repeats"):
        file.tensor(dataclasses.replace(ref, storage=storage, **change))


def test_sharded_tensors_inside_a_state_dict_are_named(tmp_path):
    weights: dict = tensors()
    weights["norm.weight"] = torch.zeros(3, 3).to_sparse()
    refused(write_raw(tmp_path, weights), r"norm\.weight is a .*, not a plain tensor")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff\xfe", '"text"'])
def test_configurations_that_are_no_object(tmp_path, content):
    folder = write_folder(tmp_path)
    (folder / "config.json").write_bytes(content.encode("latin1"))
    refused(folder, "config.json")


def test_no_configuration(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "config.json").unlink()
    refused(folder, "has no configuration; expected config.json beside it; put")


def test_two_copies_in_one_file_are_not_chosen_between(tmp_path):
    """A model and its moving average, say; a key that says drafter settles it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"model": tensors(), "state_dict": tensors(seed=1)}, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match=r"several drafters \(state_dict, model\)"):
        read_checkpoint(tmp_path / "two.pt")
    torch.save({"model": tensors(), "draft_state_dict": tensors(seed=1)}, tmp_path / "meant.pt")
    assert read_checkpoint(tmp_path / "meant.pt").extra["state_dict_at"] == "draft_state_dict"
