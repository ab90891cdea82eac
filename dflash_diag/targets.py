"""Load a target, once, and ask it for what the rest needs.

transformers is imported when a target is loaded, never before: reading a capture does not need it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_diag import gguf_loading, gguf_tokenizer
from dflash_diag.backends import Backend, choose_backend
from dflash_diag.caches import CacheAdapter
from dflash_diag.chat_templates import Renderer, TemplateError, TemplateLimit
from dflash_diag.errors import BadInput, PromptError
from dflash_diag.gguf_file import PLAIN, SUFFIX, GgufFile, in_gguf
from dflash_diag.hidden_states import (
    TargetParts,
    find_parts,
    input_device,
    norm_facts,
    text_config,
)
from dflash_diag.prompts import Prompt
from dflash_diag.storage import StrPath, make_dir, output_errors, sha256_file

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DEVICES = ("auto", "cpu", "cuda", "split")


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target, bound to one backend."""

    model: Any
    """A transformers model."""
    source: str
    """The folder, GGUF file or hub id that it was loaded from."""
    folder: Path | None
    """Where its files lie on this machine, if that is known; or the GGUF file that holds it all."""
    parts: TargetParts
    backend: Backend

    @property
    def device(self) -> torch.device:
        """Where its input goes, and its logits come from."""
        return input_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts.embedding.weight.dtype

    @property
    def n_layers(self) -> int:
        return len(self.parts.layers)

    @property
    def vocab_size(self) -> int:
        """V: rows of the head."""
        return int(self.parts.head.weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the target was made for."""
        return getattr(text_config(self.model), "max_position_embeddings", None)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ids: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for config in (generation, text_config(self.model)):
            value = getattr(config, "eos_token_id", None)
            if value is not None:
                ids |= set(value) if isinstance(value, list | tuple) else {int(value)}
        return frozenset(ids)

    @cached_property
    def caches(self) -> CacheAdapter:
        return CacheAdapter(self.model)

    @cached_property
    def can_skip_logits(self) -> bool:
        """Whether its forward can be asked for the logits of the last position alone."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """See `fingerprint`; empty where the files are not at hand."""
        return fingerprint(self.folder) if self.folder else {}

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return load_tokenizer(self.folder or self.source)

    @cached_property
    def gguf(self) -> GgufFile | None:
        """The file that it was loaded from, where that is a GGUF."""
        return GgufFile.read(self.folder) if self.folder and in_gguf(self.folder) else None

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer()

    def logits(
        self,
        ids: Tensor,
        *,
        cache: Any = None,
        last_only: bool = False,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits [N, T, V] (or [N, 1, V]) of token ids [N, T], text only.

        The model's own forward is used, so that soft-capping and logit scales are its own.
        """
        arguments: dict[str, Any] = {"use_cache": False}
        if cache is not None:
            arguments = self.caches.arguments(cache)
        if attention_mask is not None:
            arguments |= {"attention_mask": attention_mask, "position_ids": position_ids}
        if last_only and self.can_skip_logits:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self.model(input_ids=ids.to(self.device), **arguments).logits
        return logits[:, -1:] if last_only else logits

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of what the head reads [..., H], scaled and capped as configured.

        This repeats what most models do behind their final norm. Whether this one does is for the
        caller to prove, by a row of `logits`.
        """
        logits: Tensor = self.parts.head(hidden)
        config = text_config(self.model)
        if getattr(config, "logit_scale", None) is not None:
            logits = logits * config.logit_scale
        if getattr(config, "logits_scaling", None) is not None:
            logits = logits / config.logits_scaling
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def encode(self, prompt: Prompt, template: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a prompt.

        Parameters
        ----------
        template
            Extra arguments of the chat template, for prompts made of messages.

        Raises
        ------
        PromptError
            No tokenizer or chat template where one is needed; no token; an id that is not in the
            vocabulary.
        """
        if prompt.prompt_ids is not None:
            ids = list(prompt.prompt_ids)
        elif self.tokenizer is None:
            raise PromptError(
                f"prompt {prompt.id!r} is text and {self.source} has no tokenizer",
                "a tokenizer.json in the target's folder, or a tokenizer in its GGUF file",
                "or give the prompt as prompt_ids",
            )
        elif prompt.text is not None:
            ids = self._tokenized(prompt, prompt.text)
        else:
            ids = self._encode_messages(prompt, dict(template or {}))
        if not ids:
            raise PromptError(f"prompt {prompt.id!r} has no tokens", "at least one")
        self.check_ids(prompt.id, ids)
        return ids

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Refuse token ids that this target does not have."""
        known = min(int(self.parts.embedding.weight.shape[0]), self.vocab_size)
        wrong = next((i for i in ids if not 0 <= i < known), None)
        if wrong is not None:
            raise PromptError(
                f"prompt {name!r} has token id {wrong}",
                f"ids below {known}, the target's vocabulary",
                "was it made with another tokenizer?",
            )

    def _encode_messages(self, prompt: Prompt, template: dict[str, Any]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise PromptError(
                f"prompt {prompt.id!r} has messages and {self.source} has no chat template",
                do="give the prompt as text",
            )
        messages = [dict(m) for m in prompt.messages or ()]
        render = partial(self._renderer.render, self.tokenizer, arguments=template)
        try:
            text = render(messages)
            said = (index for index, message in enumerate(messages) if message.get("content"))
            ignored = next((i for i in said if _ignored(render, messages, i, text)), None)
        except TemplateError as error:
            raise PromptError(
                f"prompt {prompt.id!r}: the chat template of {self._template_source} refuses it "
                f"({error})",
                "messages in roles and an order that the template knows",
                "check its messages and --chat-template-kwargs, or give the prompt as text",
            ) from error
        if ignored is not None:
            raise PromptError(
                f"prompt {prompt.id!r}: the chat template leaves out messages entry {ignored} "
                f"(role {messages[ignored]['role']!r})",
                "roles that the template knows",
                "remove the message, or say it in another role",
            )
        return self._tokenized(prompt, text, add_special_tokens=False)

    @property
    def _template_source(self) -> str:
        """The file that the chat template stands in, as far as is known."""
        names = (*_TEMPLATES, "tokenizer_config.json")
        found = (self.folder / name for name in names if self.folder is not None)
        return str(next((path for path in found if path.is_file()), self.source))

    def _tokenized(self, prompt: Prompt, text: str, **how: bool) -> list[int]:
        try:
            return list(self.tokenizer(text, **how)["input_ids"])
        except Exception as error:  # whatever an odd tokenizer's settings lead to
            raise PromptError(
                f"prompt {prompt.id!r}: the tokenizer of {self.source} fails ({error})",
                do="check its tokenizer_config.json",
            ) from error

    def decode(self, ids: list[int]) -> str | None:
        """Text of token ids, special tokens left out; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def facts(self) -> dict[str, Any]:
        """What a capture records about its target."""
        config = text_config(self.model)
        layer_types = getattr(config, "layer_types", None)
        return {
            **self._origin(),
            "source": Path(self.source).name,
            "architecture": type(self.model).__name__,
            "hidden_size": int(self.parts.embedding.weight.shape[1]),
            "vocab_size": self.vocab_size,
            "n_layers": self.n_layers,
            "layer_types": list(layer_types) if layer_types else None,
            "layers_path": self.parts.path,
            "max_positions": self.max_positions,
            "n_parameters": self._n_parameters(),
            "tied": self.parts.tied,
            "eos_token_ids": sorted(self.eos_ids),
            "special_token_ids": special_ids(self.tokenizer),
            "final_norm": norm_facts(self.parts.final_norm),
            "embedding_scale": _scalar(getattr(self.parts.embedding, "embed_scale", 1.0)),
            "softcap": getattr(config, "final_logit_softcapping", None),
            "logit_scale": _logit_scale(config),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "attention": getattr(config, "_attn_implementation", None),
            "backend": self.backend.to_json(),
            "files": self.fingerprint,
        }

    def _origin(self) -> dict[str, Any]:
        """What the weights were before they were numbers; nothing where they always were."""
        if self.gguf is None:
            return {}
        types, name = self.gguf.tensor_types, self.gguf.path.name
        origin = {
            "file": name,
            "sha256": self.fingerprint["weights"][name],
            "architecture": self.gguf.architecture,
            "tensor_types": types,
            "dequantised": not types.keys() <= set(PLAIN),
        }
        return {"gguf": origin}

    def save(self, folder: StrPath) -> Path:
        """Write model and tokenizer as a transformers folder, for what reads no GGUF.

        Raises
        ------
        OutputError
            The folder cannot be written.
        """
        folder = make_dir(folder)
        with output_errors(folder), _quiet_loading():
            self.model.save_pretrained(folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
        return folder

    def _n_parameters(self) -> int:
        n = sum(p.numel() for p in self.model.parameters())
        twice = self.parts.tied and self.parts.embedding.weight is not self.parts.head.weight
        return n - self.parts.head.weight.numel() if twice else n


def load_target(
    source: StrPath,
    *,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    max_memory: Mapping[int | str, int | str] | None = None,
) -> Target:
    """Load a target from a folder or a GGUF file, or by a hub id through transformers.

    Parameters
    ----------
    device
        ``auto`` takes a GPU if there is one. ``split`` is for a target that is too big for it: its
        layers are spread over all GPUs, then host memory, then the disk, by accelerate. They still
        run on a GPU, each fetched when its turn comes.
    dtype
        ``auto`` is float32 on a CPU and the checkpoint's own type on a GPU. The blocks of a GGUF
        file have no type of their own; what they are worth is float32.
    max_memory
        For ``split``: how much each place may hold, such as ``{0: "70GiB", "cpu": "100GiB"}``. All
        that is free, if not given.

    Raises
    ------
    BadInput
        Nothing there, not a model, tensors missing, or a device or backend that cannot be used.
    """
    folder = existing_files(source)
    place = resolve_device(device)
    if dtype not in ("auto", *DTYPES):
        raise BadInput(f"--dtype {dtype}", f"one of auto, {', '.join(DTYPES)}")
    in_full = place.type == "cpu" or (folder is not None and in_gguf(folder))
    wanted = DTYPES.get(dtype) or (torch.float32 if in_full else "auto")
    if device == "split":
        with _quiet_loading():
            model = _spread(folder or str(source), wanted, max_memory)
    else:
        with _quiet_loading():
            model = _from_pretrained(folder or str(source), wanted).to(place)
    model = model.eval().requires_grad_(requires_grad=False)
    if folder is None:
        folder = _hub_folder(str(source))
    return wrap_target(model, source=str(source), folder=folder, backend=backend)


def wrap_target(
    model: Any,
    *,
    source: str = "",
    folder: Path | None = None,
    backend: str = "auto",
) -> Target:
    """A target from a transformers model that is already in memory."""
    parts = find_parts(model)
    chosen = choose_backend(model, parts, backend)
    return Target(model=model, source=source, folder=folder, parts=parts, backend=chosen)


def existing_files(source: StrPath) -> Path | None:
    """The folder or GGUF file ``source``, or None for what looks like a hub id.

    Raises
    ------
    BadInput
        A file that is no usable GGUF, a folder without a model, or a path that leads nowhere.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = sorted(one.name for one in path.glob(f"*{SUFFIX}"))
            raise BadInput(
                f"{source} has no config.json",
                "the folder of a transformers model, or a GGUF file",
                f"name the file: {path / inside[0]}" if inside else None,
            )
        return path
    if in_gguf(path):
        return GgufFile.read(path).path
    if path.exists():
        raise BadInput(
            f"{source} is a file", f"a transformers folder, a {SUFFIX} file, or a hub id"
        )
    text = str(source)
    if path.suffix == SUFFIX:
        raise BadInput(f"no such file: {source}", "a GGUF file")
    if path.is_absolute() or text.count("/") != 1 or text.startswith((".", "~")):
        raise BadInput(f"no such folder: {source}", "the folder of a transformers model")
    return None


def resolve_device(name: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` means on this machine.

    ``split`` is about the target's layers; all else goes where ``auto`` puts it.

    Raises
    ------
    BadInput
        Another name, or a GPU that torch does not see.
    """
    if name not in DEVICES and not name.startswith("cuda:"):
        raise BadInput(f"--device {name}", f"one of {', '.join(DEVICES)}")
    has_gpu = torch.cuda.is_available()
    if name.startswith("cuda") and not has_gpu:
        raise BadInput(f"--device {name}, but torch sees no GPU", do="use --device cpu")
    if name.startswith("cuda:") and not 0 <= int(name[5:]) < torch.cuda.device_count():
        raise BadInput(f"--device {name}, but torch sees {torch.cuda.device_count()} GPUs")
    if name in ("auto", "split"):
        name = "cuda" if has_gpu else "cpu"
    return torch.device(name)


def _spread(
    source: StrPath, dtype: torch.dtype | str, max_memory: Mapping[int | str, int | str] | None
) -> Any:
    """A model whose layers accelerate has spread over GPUs, host memory and disk."""
    if importlib.util.find_spec("accelerate") is None:
        raise BadInput(
            "--device split needs accelerate, which is not installed",
            do="pip install 'dflash-diag[big]'",
        )
    # Layers whose type changes while loading are written here; the others stay in their files.
    folder = tempfile.TemporaryDirectory(prefix="dflash-diag-", ignore_cleanup_errors=True)
    limits = None if max_memory is None else dict(max_memory)
    placing = {"device_map": "auto", "max_memory": limits, "offload_folder": folder.name}
    try:
        model = _from_pretrained(source, dtype, **placing)
    except BaseException:
        folder.cleanup()
        raise
    weakref.finalize(model, folder.cleanup)
    return model


def _from_pretrained(source: StrPath, dtype: torch.dtype | str, **placing: Any) -> Any:
    file = GgufFile.read(source) if in_gguf(source) else None
    try:
        if file is None:
            model, loading = _from_folder(source, dtype, placing)
        else:
            model, loading = _from_gguf(file, dtype, placing)
    except BadInput:
        raise
    except Exception as error:  # transformers raises whatever an odd configuration leads to
        lines = str(error).strip().splitlines()
        found = f"{source} cannot be loaded ({lines[0] if lines else type(error).__name__})"
        if file is None:
            raise BadInput(found, "a transformers causal language model") from error
        raise BadInput(
            found,
            "a causal language model of an architecture that transformers loads from GGUF "
            f"(this one is {file.architecture!r})",
            "give it as a transformers folder",
        ) from error
    lacking = sorted(str(k) for k in loading["missing_keys"])
    lacking += sorted(str(k) for k in loading["mismatched_keys"])
    if lacking:
        # transformers would go on with random weights.
        raise BadInput(
            f"{source} lacks {len(lacking)} of the model's tensors or has them in another shape "
            f"({', '.join(lacking[:3])}{', …' if len(lacking) > 3 else ''})",
            "a complete checkpoint",
        )
    return model


def _from_folder(
    source: StrPath, dtype: torch.dtype | str, placing: Mapping[str, Any]
) -> tuple[Any, Any]:
    """A model, and what transformers says about its loading."""
    from transformers import AutoConfig

    # Said outright: otherwise transformers asks whether to run the code that a folder brings.
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    _refuse_fetched_code(source, config)
    return _class_of(config).from_pretrained(
        source, dtype=dtype, output_loading_info=True, trust_remote_code=False, **placing
    )


def _from_gguf(
    file: GgufFile, dtype: torch.dtype | str, placing: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The same for a GGUF file; what lies beside it does not count."""
    from transformers import AutoConfig

    # Its whole path, so that no file of the same name in the working directory is taken.
    folder, name = file.path.parent, str(file.path)
    with gguf_loading.quick_reading():
        config = AutoConfig.from_pretrained(folder, gguf_file=name)
        kind = _class_of(config)
        gguf_loading.refuse_another_model(file, config, kind)
        model, loading = kind.from_pretrained(
            folder,
            gguf_file=name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            **gguf_loading.as_plain_numbers(),
            **placing,
        )
    if file.end_ids:
        model.generation_config.eos_token_id = file.end_ids
    return model, loading


def _class_of(config: Any) -> Any:
    """The class of the model that a configuration describes."""
    import transformers

    name = (getattr(config, "architectures", None) or [""])[0]
    kind = getattr(transformers, name, None)
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind
    return transformers.AutoModelForCausalLM


def _refuse_fetched_code(source: StrPath, config: Any) -> None:
    """An attention called ``owner/name`` is code that transformers would fetch and run."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in parts:
        found = str(getattr(part, "_attn_implementation", None))
        if "/" in found:
            raise BadInput(
                f"{source} wants code from elsewhere for its attention ({found})",
                "an attention that is transformers' own",
                "remove attn_implementation from its config.json",
            )


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Keep transformers' bars and tables out of logs and notebooks while weights load.

    What the tables say, that tensors are missing, is an error here.
    """
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _hub_folder(source: str) -> Path | None:
    from transformers.utils.hub import cached_file

    path = cached_file(source, "config.json", local_files_only=True)
    return None if path is None else Path(path).parent


def load_tokenizer(source: StrPath) -> Any:
    """The tokenizer of a target, or None where it has none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    file = GgufFile.read(source) if in_gguf(source) else None
    try:
        if file is not None:
            return gguf_tokenizer.load_tokenizer(file)
        own = folder / "tokenizer.json"
        if own.is_file() and not (folder / "tokenizer_config.json").is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(own))
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # tokenizers raises nothing more special
        lines = str(error).strip().splitlines()
        raise BadInput(
            f"the tokenizer of {source} cannot be loaded ({lines[0] if lines else error!r})",
            "a tokenizer that transformers can read",
        ) from error


def special_ids(tokenizer: Any) -> list[int]:
    """Tokens that stand for no text: those with a role, and others that are set apart for one.

    Drafters take their mask token from the latter. At most `MOST_SPECIAL`, the first ones.
    """
    if tokenizer is None:
        return []
    apart = [i for i, one in tokenizer.added_tokens_decoder.items() if one.special]
    ids = dict.fromkeys([*sorted(tokenizer.all_special_ids), *sorted(apart)])
    return sorted(list(ids)[:MOST_SPECIAL])


MOST_SPECIAL = 32
"""Vocabularies set hundreds apart, and each is a reading to try."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_ALSO_HASHED = ("config.json", "generation_config.json", "tokenizer_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_WHOLE = 2**28
_SAMPLES, _SAMPLE_BYTES = 64, 2**16


def fingerprint(folder: StrPath) -> dict[str, Any]:
    """Hashes that identify a target: ``{"weights", "config", "tokenizer", "chat_template"}``.

    Files up to 256 MiB are hashed whole. Of larger ones the size, the header and 64 evenly spaced
    pieces of 64 KiB are, so that a target of 50 GiB takes no minute; such hashes start with
    ``sampled:``. ``chat_template`` is None where there is none. A GGUF file is all of it in one.
    """
    folder = Path(folder)
    if in_gguf(folder):
        file = GgufFile.read(folder)
        weights = {file.path.name: _hash(file.path)}
        template = file.sha256_of_template
        return {"weights": weights, "config": {}, "tokenizer": {}, "chat_template": template}

    def hashed(names: tuple[str, ...]) -> dict[str, str]:
        found = sorted({p for name in names for p in folder.glob(name) if p.is_file()})
        return {p.name: _hash(p) for p in found}

    return {
        "weights": hashed(_WEIGHTS),
        "config": hashed(_ALSO_HASHED),
        "tokenizer": hashed(TOKENIZER_FILES),
        "chat_template": _template_hash(folder),
    }


def _hash(path: Path) -> str:
    size = path.stat().st_size
    if size <= _WHOLE:
        return sha256_file(path)
    digest = hashlib.sha256(struct.pack("<Q", size))
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"sampled:{digest.hexdigest()}"


def _template_hash(folder: Path) -> str | None:
    for name in _TEMPLATES:
        if (folder / name).is_file():
            return sha256_file(folder / name)
    if not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{folder / 'tokenizer_config.json'} is not JSON ({error})") from error
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def _ignored(
    render: Callable[[list[dict[str, Any]]], str],
    messages: list[dict[str, Any]],
    index: int,
    text: str,
) -> bool:
    """Whether a chat template makes the same text of other words in this message."""
    other = {**messages[index], "content": f"{messages[index]['content']}?!"}
    try:
        return render([*messages[:index], other, *messages[index + 1 :]]) == text
    except TemplateLimit:  # once for each message would be too often
        raise
    except TemplateError:  # it has read the words then
        return False


def _logit_scale(config: Any) -> float:
    """Factor on the logits: Cohere multiplies by ``logit_scale``, Granite divides."""
    if getattr(config, "logit_scale", None) is not None:
        return float(config.logit_scale)
    if getattr(config, "logits_scaling", None) is not None:
        return 1.0 / float(config.logits_scaling)
    return 1.0


def _scalar(value: Any) -> float:
    return float(value)
