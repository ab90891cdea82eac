"""Claimed numbers and the definitions that can have printed them, on worked examples."""

from __future__ import annotations

import pytest

from dflash_diag import cli, definitions, paths
from dflash_diag.bounds import Bounds, Number, Reading
from dflash_diag.claims import judge, read_claims, read_log
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput
from dflash_diag.metric_names import read_name, read_names, split_group
from dflash_diag.stats import Estimate
from dflash_diag.training_logs import read_training_log

TRAINING = ["accuracy=0.252", "streak=1.24", "dds4=2.78", "dds8=3.58"]
PAIRED = ["eval/streak=0.705", "eval/dds4=1.575", "eval/dds8=1.985", "eval/acc_1=0.45"]


def fits(texts, **how):
    return {one.claim.name: one for one in judge(read_claims(texts), **how)}


@pytest.mark.parametrize("d", [None, 7, 15])
def test_a_training_line_fits_the_oracle_with_or_without_bonus_and_the_tree(d):
    found = fits(TRAINING, n_proposed=d)
    for n in (4, 8):
        assert found[f"dds{n}"].fits == (
            f"topk_oracle@{n} uniform",
            f"topk_oracle@{n} + 1 uniform",
            f"ddtree_tau@{n} uniform",
        )
    assert found["streak"].fits == ("streak uniform",)
    assert found["accuracy"].fits == ("accuracy uniform",)
    assert {one.by for one in found.values()} == {"bounds"}


@pytest.mark.parametrize("d", [None, 7, 15])
def test_its_paired_evaluation_excludes_the_bonus_of_the_oracle_only(d):
    """1.575 - 1 < 0.705; the tree is bounded by slot 1 alone, 0.45 <= 0.575."""
    found = fits([*TRAINING, *PAIRED], n_proposed=d)
    for n in (4, 8):
        assert found[f"eval/dds{n}"].fits == (f"topk_oracle@{n} uniform", f"ddtree_tau@{n} uniform")
        assert len(found[f"dds{n}"].fits) == 3  # another line
    assert dict(found["eval/dds4"].excluded) == {
        "topk_oracle@4 + 1 uniform": "it is at least 1.7 where eval/streak = 0.705"
    }
    assert (
        "eval/dds4 = 1.575 would be read alike"
        in dict(found["eval/dds8"].excluded)["topk_oracle@8 + 1 uniform"]
    )


def test_a_better_slot_1_excludes_the_tree():
    found = fits([*PAIRED[:3], "eval/acc_1=0.61"])
    assert found["eval/dds4"].fits == ("topk_oracle@4 uniform",)
    assert found["eval/dds8"].fits == ("topk_oracle@8 uniform",)


@pytest.mark.parametrize(
    ("texts", "contradicting"),
    [
        (["dds4=2.78", "dds8=2.11"], {"dds4", "dds8"}),
        (["streak=1.24", "tau=2.50", "dds4=2.2"], {"streak", "tau"}),
        (["topk_oracle@4=1.10", "streak=1.24"], {"topk_oracle@4", "streak"}),
        (["topk_oracle@4=2.00", "topk_oracle@8=2.10", "streak=1.99"], set()),
        (["dds4=1.20", "streak=1.24"], set()),  # a tree may be short
        (["accuracy=0.99", "streak=0.25"], {"accuracy", "streak"}),
        (["survival@2=0.52", "marginal@2=0.31", "acc_1=0.60"], {"survival@2", "marginal@2"}),
        (["acc_1=0.45", "ddtree_tau@1=1.45"], set()),
        (["acc_1=0.45", "ddtree_tau@1=1.61", "full_block=0.01"], {"acc_1", "ddtree_tau@1"}),
    ],
)
def test_claims_that_contradict_each_other_are_named(texts, contradicting):
    found = fits(texts, n_proposed=7)
    said = {name for name, one in found.items() if one.contradicts}
    assert said == contradicting
    assert all(not found[name].fits for name in contradicting)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("accuracy=1.30", "at most 1"),
        ("streak=-0.20", "at least 0"),
        ("tau=0.40", "at least 1"),
        ("streak=7.20", "at most 7"),
        ("ddtree_tau@4=9.50", "at most 5"),
        ("position_9_acc=0.10", "7 slots"),
    ],
)
def test_a_number_out_of_range_fits_nothing(text, why):
    (found,) = fits([text], n_proposed=7).values()
    assert found.fits == ()
    assert any(why in reason for _, reason in found.excluded)


def test_a_bare_length_may_be_over_any_anchors_and_any_average():
    (found,) = fits(["tau=2.4"]).values()
    assert found.fits == ("tau uniform", "tau uniform macro", "tau walked", "tau walked macro")
    (found,) = fits(["tau_walked_macro=2.4"]).values()
    assert found.fits == ("tau walked macro",)
    (found,) = fits(["train/tau=2.4"]).values()
    assert found.fits == ("tau uniform",)


def test_an_unknown_name_is_tried_against_everything_that_fits_its_line():
    found = fits(["foo=2.90", "train/x=0.3", "streak=1.20"], n_proposed=7)
    assert "topk_oracle@4 uniform" in found["foo"].fits
    assert "streak uniform" not in found["foo"].fits
    assert "accuracy uniform" not in found["foo"].fits
    assert "accuracy uniform" in found["train/x"].fits
    assert "tau uniform" not in found["train/x"].fits


def test_many_ambiguous_names_are_judged_in_bounded_time():
    names = ["accept_len", "EAL", "acceptance_length", "AL", "dds4", "position_2_acc"]
    found = fits([f"{name}=1.50" for name in names[:-1]] + ["position_2_acc=0.40", "streak=1.20"])
    assert "streak uniform" not in found["EAL"].fits
    assert "tau uniform" not in found["EAL"].fits
    assert "eal_product uniform" in found["EAL"].fits


def test_measurement_on_the_training_text_decides_and_on_other_text_only_hints():
    values = {
        "topk_oracle@8 uniform": Estimate(3.6, 3.4, 3.8, 30),
        "topk_oracle@8 + 1 uniform": Estimate(4.6, 4.4, 4.8, 30),
        "ddtree_tau@8 uniform": Estimate(2.4, 2.3, 2.5, 30),
    }
    found = fits(TRAINING, training={"train": values})["dds8"]
    assert (found.fits, found.by) == (("topk_oracle@8 uniform",), "measured")
    assert "4.6" in dict(found.excluded)["topk_oracle@8 + 1 uniform"]
    hinted = fits(TRAINING, prompts=values)["dds8"]
    assert (len(hinted.fits), hinted.by) == (3, "bounds")
    assert {one.name: one.within for one in hinted.hints} == {
        "topk_oracle@8 uniform": True,
        "topk_oracle@8 + 1 uniform": False,
        "ddtree_tau@8 uniform": False,
    }
    far = {"topk_oracle@8 uniform": Estimate(1.0, 0.9, 1.1, 30)}
    assert fits(TRAINING, training={"train": far})["dds8"].by == "bounds"


def test_the_json_is_the_contracts():
    record = fits(TRAINING)["dds8"].to_json()
    assert record["name"] == "dds8"
    assert record["value"] == 3.58
    assert record["by"] == "bounds"
    assert record["fits"] == [
        "topk_oracle@8 uniform",
        "topk_oracle@8 + 1 uniform",
        "ddtree_tau@8 uniform",
    ]
    assert record["excluded"] == []


@pytest.mark.parametrize(
    "text", ["dds8", "=3", "dds8=", "dds8=high", "dds8=nan", "tau=inf", "eval/=1"]
)
def test_a_claim_that_is_no_number_is_bad_input(text):
    with pytest.raises(BadInput, match="NAME=VALUE"):
        read_claims([text])


def test_a_number_is_known_to_half_its_last_decimal():
    (line,) = read_claims(["a=3.58", "b=3", "c=0.705", "d=1e-3"])
    assert [c.number.slack for c in line.claims] == pytest.approx([0.005, 0.05, 0.0005, 0.0005])


@pytest.mark.parametrize(
    ("name", "group", "metric"),
    [
        ("train/streak", "train", "streak"),
        ("eval/gsm8k/accept_length", "eval/gsm8k", "accept_length"),
        ("val_accuracy", "val", "accuracy"),
        ("train.tau", "train", "tau"),
        ("training", "", "training"),
        ("streak", "", "streak"),
        ("streak/val", "val", "streak"),
    ],
)
def test_a_group_is_what_a_name_begins_with(name, group, metric):
    assert split_group(name) == (group, metric)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("dds8", {"topk_oracle@8", "ddtree_tau@8"}),
        ("ddtree8", {"topk_oracle@8", "ddtree_tau@8"}),
        ("DDTree@4", {"topk_oracle@4", "ddtree_tau@4"}),
        ("ddtree_tau@4", {"ddtree_tau@4"}),
        ("topk_oracle@4", {"topk_oracle@4"}),
        ("acc", {"accuracy@None"}),
        ("full_acc", {"accuracy@None"}),
        ("accuracy", {"accuracy@None"}),
        ("token_accuracy", {"accuracy@None"}),
        ("streak", {"streak@None"}),
        ("tau", {"tau@None"}),
        ("accept_rate", {"draft_acceptance_rate@None", "verify_rate@None"}),
        ("position_3_acc", {"marginal@3", "survival@3", "conditional@3"}),
        ("slot_accuracy@2", {"marginal@2", "survival@2", "conditional@2"}),
    ],
)
def test_names_are_read_loosely(name, kinds):
    read = read_name(name)
    assert read.known
    assert {f"{r.kind}@{r.number}" for r in read.readings} == kinds


@pytest.mark.parametrize("name", ["EAL", "accept_len", "accept_length", "mean_acceptance_length"])
def test_accepted_lengths_may_have_the_bonus_and_may_be_products(name):
    kinds = {(r.kind, r.bonus) for r in read_name(name).readings}
    assert {("streak", False), ("tau", False), ("eal_product", False)} <= kinds


@pytest.mark.parametrize("name", ["loss", "lr", "learning_rate", "grad_norm", "top_4_acc", "epoch"])
def test_other_metrics_are_not_taken_for_acceptance(name):
    assert not read_name(name).known


def test_every_definition_is_found_by_its_own_name():
    for name, one in definitions.definitions(3).items():
        read = read_name(name)
        assert Reading(one.kind, one.number, one.bonus) in read.readings, name
        assert read.population == one.population


def test_slots_counted_from_0_are_told_by_a_slot_0():
    first, second = read_names(["accept_rate@0", "accept_rate@1"])
    assert [r.number for r in first.readings] == [1, 1, 1]
    assert [r.number for r in second.readings] == [2, 2, 2]
    (only,) = read_names(["acc_1"])
    assert [r.kind for r in only.readings] == ["marginal"]


@pytest.mark.parametrize(
    ("reading", "given", "low", "high"),
    [
        (Reading("tau"), [(Reading("streak"), 1.2)], 2.2, 2.2),
        (Reading("ddtree_tau", 1), [(Reading("marginal", 1), 0.45)], 1.45, 1.45),
        (Reading("streak"), [(Reading("accuracy"), 0.2)], 0.0, 1.4),
        (Reading("topk_oracle", 8), [(Reading("topk_oracle", 4), 2.0)], 2.0, 7.0),
        (Reading("survival", 3), [(Reading("marginal", 3), 0.3)], 0.0, 0.3),
        (Reading("chain_tau", 2), [(Reading("marginal", 1), 0.5)], 1.5, 2.0),
        (Reading("verify_rate"), [(Reading("streak"), 3.0)], 0.5, 0.5),
        # 4 nodes hold no path of depth 3 that misses slot 1's top choice
        (Reading("ddtree_tau", 4), [(Reading("marginal", 1), 0.0)], 1.0, 3.0),
        (Reading("eal_product"), [(Reading("marginal", k), 0.5) for k in range(1, 8)], 0.5, 3.5),
    ],
)
def test_spans_are_those_worked_out_by_hand(reading, given, low, high):
    numbers = [(one, Number(value, 0)) for one, value in given]
    assert Bounds(7).span(reading, numbers) == pytest.approx((low, high), abs=1e-6)


def test_the_first_line_of_a_log_excludes_what_it_could_not_have_printed(tmp_path):
    """No tree and no length with the bonus token is ever 0."""
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"step": 1, "streak": 0.0, "dds4": 0.0}\n{"step": 900, "streak": 1.24, "dds4": 2.78}\n'
    )
    (line,) = read_log(read_training_log(path))
    found = {one.claim.name: one for one in judge([line])}
    assert found["dds4"].fits == ("topk_oracle@4 uniform",)
    assert found["dds4"].claim.value == 2.78
    why = dict(found["dds4"].excluded)["ddtree_tau@4 uniform"]
    assert why == "the log's line at step 1 excludes it (dds4 = 0)"


# --- where they come in --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["report", "doctor"])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--claim", "dds8", "--claim dds8; expected NAME=VALUE"),
        ("--claim", "dds8=high", "--claim dds8=high; expected NAME=VALUE"),
        ("--training-log", "nowhere.csv", "no such file"),
    ],
)
def test_bad_claims_end_a_run_before_it_begins(verb, option, value, said, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.run([verb, option, value, "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert not out.exists()


def test_the_examples_log_lies_beside_its_drafter():
    config = RunConfig().resolved()
    assert config.training_log == f"{config.drafter}/training_log.jsonl"
    own = paths.data_dir() / "zoo/hybrid/drafters/healthy/training_log.jsonl"
    assert RunConfig(training_log=str(own)).resolved().training_log == str(own)


@pytest.mark.parametrize("name", ["anchor_included", "healthy", "label_shift", "cross_block_leak"])
def test_a_log_of_the_zoo_has_the_readings_of_its_trainer(name):
    """Its trainer counts leading labels in the top 4 and 8 over all anchors, without the bonus."""
    path = paths.data_dir() / f"zoo/hybrid/drafters/{name}/training_log.jsonl"
    (line,) = read_log(read_training_log(path))
    truth = {"streak": "streak", "accuracy": "accuracy"}
    truth |= {f"dds{n}": f"topk_oracle@{n}" for n in (4, 8)}
    truth |= {f"slot_accuracy@{k}": f"marginal@{k}" for k in range(1, 8)}
    for one in judge([line], n_proposed=7):
        assert one.fits == (f"{truth[one.claim.name]} uniform",)
