"""Optimizer of a plan: arguments, groups, and every mistake with the key that was typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.hydra import compose, compose_with_yaml, recompose, run_with_config
from launcher.config.schema import OptimizerConfig
from launcher.errors import ConfigError
from launcher.plan.optimizer_plan import arguments_of, assign, require_members, solve_optimizer
from launcher.plan.resumable import as_typed, changes, refusal_text, refusals

NAMES = [
    (("embed.weight", "head.weight"), 2), (("blocks.0.norm.weight",), 1), (("blocks.0.up.weight",), 2),
    (("blocks.0.up.bias",), 1),
]  # fmt: skip
DECAY = {"match": "ndim<2", "weight_decay": 0}


def optimizer(*overrides: str) -> OptimizerConfig:
    return compose(overrides).optimizer


def test_the_first_group_that_matches_takes_a_parameter() -> None:
    groups = [DECAY, {"match": "blocks.*weight", "lr": 1}, {"match": "norm", "lr": 2}]
    assert assign(NAMES, groups) == [None, 0, 1, 0]
    assert assign(NAMES, groups[::-1]) == [None, 0, 1, 2]
    assert assign(NAMES, [{"match": "head"}]) == [0, None, None, None], "a tied one by each of its names"


@pytest.mark.parametrize(
    ("match", "taken"), [("ndim<2", 2), ("ndim <= 2", 4), ("ndim==2", 2), ("ndim>2", 0), ("^up", 0)]
)
def test_what_a_match_takes(match: str, taken: int) -> None:
    assert sum(number is not None for number in assign(NAMES, [{"match": match}])) == taken


def test_no_decay_of_biases_and_norms_is_the_default() -> None:
    assert solve_optimizer(optimizer(), 64).groups == [{"match": "ndim<2", "weight_decay": 0.0}]
    for other in ("optimizer.weight_decay=0", "optimizer=sgd"):  # the decay may change on resume, the groups may not
        assert solve_optimizer(optimizer(other), 64).groups == [{"match": "ndim<2", "weight_decay": 0.0}]
    assert solve_optimizer(optimizer("optimizer.groups=[]"), 64).groups == []
    assert solve_optimizer(optimizer("optimizer._target_=a.B", "optimizer.lr=1"), 64).groups == []


def test_scaling_multiplies_the_rate_of_every_group() -> None:
    groups = "optimizer.groups=[{match: embed, lr: 0.1}, {match: up, _target_: torch.optim.Muon, lr: 0.2}]"
    scaled = ["optimizer.lr=1", "optimizer.lr_scaling=linear", "optimizer.reference_batch=32"]
    plan = solve_optimizer(optimizer(groups, *scaled), 64)
    assert (plan.lr, [group["lr"] for group in plan.groups]) == (2.0, [0.2, 0.4])
    betas = ["optimizer.groups=[{match: embed, lr: 0.1}]", *scaled, "optimizer.lr_scaling=sqrt"]
    plan = solve_optimizer(optimizer(*betas), 64)
    assert plan.groups[0]["lr"] == pytest.approx(0.1 * 2**0.5)
    assert arguments_of(plan, plan.groups[0])["betas"] == plan.betas != [0.9, 0.95]


def test_keys_of_a_class_are_its_arguments() -> None:
    config = optimizer(
        "optimizer._target_=torch.optim.RMSprop", "optimizer.lr=0.1", "optimizer.alpha=0.9", "optimizer.eps=1"
    )
    assert (config.kind.value, config.target, config.arguments) == ("custom", "torch.optim.RMSprop", {"alpha": 0.9})
    plan = solve_optimizer(config, 64)
    assert arguments_of(plan) == {"alpha": 0.9, "eps": 1.0, "lr": 0.1}
    assert plan.groups == [], "the class's own decay is not known"
    group = {"match": "up", "_target_": "torch.optim.Muon", "lr": 1.0}
    assert arguments_of(plan, group) == {"lr": 1.0}
    assert arguments_of(plan, {"match": "up", "eps": 2}) == {"alpha": 0.9, "eps": 2, "lr": 0.1}


def test_muon_takes_the_matrices_of_hidden_layers() -> None:
    groups = solve_optimizer(optimizer("optimizer=muon"), 64).groups
    hidden = ["blocks.0.up.weight", "layers.1.attention.output.dense.weight", "decoder.0.multihead_attn.in_proj_weight"]
    hidden.append("mlp.fc.weight")
    others = [
        *("embed_tokens.weight", "transformer.wte.weight", "shared.weight", "model.embeddings.word.weight"),
        *("lm_head.weight", "output.weight", "net.head.weight", "model.classifier.0.weight", "cls_head.out.weight"),
        *("tok_emb.weight", "pos_emb.weight", "token_emb.emb.weight", "emb.weight", "fc.weight"),
    ]
    parameters = [([name], 2) for name in (*hidden, *others)] + [(["conv.weight"], 4), (["blocks.0.norm.weight"], 1)]
    taken = [groups[number].get("_target_") if number is not None else None for number in assign(parameters, groups)]
    assert taken == ["torch.optim.Muon"] * len(hidden) + [None] * (len(others) + 2)
    require_members([([hidden[0]], 2)], groups)  # a model without biases and convolutions
    with pytest.raises(ConfigError, match="matches no parameter that is trained"):
        require_members([([others[0]], 2)], groups)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["optimizer.rho=1"], "optimizer.rho", "there is no such key"),
        (["optimizer.momentun=1"], "optimizer.momentun", "momentum"),
        (["schedule.T_max=1"], "schedule.T_max", "there is no such key"),
        (["optimizer=custom", "optimizer.lr=1"], "optimizer._target_", "needs the class"),
        (["optimizer=sgd", "optimizer._target_=a.B"], "optimizer._target_", "optimizer=custom"),
        (["optimizer._target_=a.B"], "optimizer.lr", "give the learning rate"),
        (["optimizer.groups=[{lr: 1}]"], "optimizer.groups[0]", "has no key match"),
        (["optimizer.groups=[{match: '('}]"], "optimizer.groups[0].match", "a regular expression"),
        (["optimizer.groups=[{match: a, momentum: 1}]"], "optimizer.groups[0].momentum", "no such argument"),
        (["optimizer.groups=[{match: a, lr: 0}]"], "optimizer.groups[0].lr", "above 0"),
        (["optimizer.groups=[{match: a, weight_decay: -1}]"], "optimizer.groups[0].weight_decay", "at least 0"),
        (["optimizer.groups=[{match: a, lr: x}]"], "optimizer.groups[0].lr", "above 0"),
        (["optimizer.groups=[{match: a, lr: true}]"], "optimizer.groups[0].lr", "above 0"),
        (["optimizer.groups=[{match: a, betas: 0.5}]"], "optimizer.groups[0].betas", "two numbers"),
        (["optimizer.groups=[{match: a, betas: [1.5, 2]}]"], "optimizer.groups[0].betas", "two numbers"),
        (["optimizer.groups=[{match: a, _target_: null}]"], "optimizer.groups[0]._target_", "dotted path"),
        (["optimizer.groups=[{match: 'ndim=2'}]"], "optimizer.groups[0].match", "ndim==2"),
        (["optimizer.groups=[{match: a, _target_: b.C}]"], "optimizer.groups[0].lr", "a rate of its own"),
        (
            ["optimizer.groups=[{match: a, betas: [0,0]}]", "optimizer.lr_scaling=sqrt", "optimizer.reference_batch=1"],
            "optimizer.lr_scaling", "a group with betas",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_its_key(overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        solve_optimizer(optimizer(*overrides), 64)
    assert str(raised.value).startswith(key)
    assert words in str(raised.value)


def test_a_mistake_in_a_file_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("kind: sgd\nlr: 0.1\nnesterof: true\n")
    with pytest.raises(ConfigError, match=r"mine.yaml, line 3: optimizer.nesterof: there is no such key"):
        run_with_config("plan", ["--config-dir", str(tmp_path), "optimizer=mine"], lambda *_: 0)


def test_a_group_without_parameters_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"groups\[0\].match=embedd.weight: matches no[^\n]*\n.*embed.weight"):
        require_members(NAMES, [{"match": "embedd.weight"}])
    with pytest.raises(ConfigError, match=r"groups\[1\].match=bias: all 1 parameters[^\n]*earlier groups"):
        require_members(NAMES, [DECAY, {"match": "bias"}])
    require_members([(("weight",), 2)], [{"match": "ndim<2", "weight_decay": 0.0}])  # the default


@pytest.mark.parametrize("extra", [["optimizer.lr=0.1,0.2", "-m"], ["optimizer.lr=0.1", "--cfg", "job"]])
def test_a_class_with_flags(extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The option that it implies once came before the flags, which Hydra then did not understand."""
    seen: list[float] = []
    words = ["optimizer._target_=torch.optim.RMSprop", *extra]
    run_with_config("plan", words, lambda config, _: seen.append(config.optimizer.lr) or 0)
    assert seen == [0.1, 0.2] if "-m" in extra else "torch.optim.RMSprop" in capsys.readouterr().out


def test_a_muon_run_becomes_adamw_and_stays_muon() -> None:
    """Both have kind: adamw."""
    _, yaml = compose_with_yaml(["optimizer=muon", "optimizer.lr=0.01"])
    same, other = (recompose(yaml, [f"optimizer={name}"])[0].optimizer for name in ("muon", "adamw"))
    assert (same.lr, len(same.groups or ())) == (0.01, 3)
    assert (other.lr, other.groups) == (compose().optimizer.lr, compose().optimizer.groups)


def test_another_class_is_refused_on_resume_with_or_without_a_rate_of_its_own() -> None:
    _, yaml = compose_with_yaml(["optimizer.lr=0.7"])
    before = recompose(yaml, ())[0]
    for rate, overrides in ((0.7, ()), (1, ("optimizer.lr=1",))):
        after = recompose(yaml, ["optimizer._target_=torch.optim.RMSprop", *overrides])[0]
        assert (after.optimizer.kind.value, after.optimizer.lr) == ("custom", rate)
        text = refusal_text(refusals(changes(as_typed(before), as_typed(after)), ()))
        assert text.startswith("these keys cannot change when a run resumes")
        assert "optimizer._target_=torch.optim.RMSprop (was null): the checkpoint's optimizer state does" in text


def test_only_the_changed_argument_of_a_group_is_shown() -> None:
    groups = 'optimizer.groups=[{match: "ndim<2", weight_decay: %s}, {match: "(up|down).weight", lr: 0.1}]'
    before, after = (as_typed(compose([groups % decay])) for decay in (0, 0.1))
    lines = refusals(changes(before, after), ())
    assert lines == ["optimizer.groups[0].weight_decay=0.1 (was 0): it is part of the update rule; --force allows it."]
    assert refusal_text(lines).startswith("these keys change only with --force when a run resumes:")
    (line,) = refusals(changes(before, as_typed(compose(["optimizer.groups=[{match: embed, lr: 1}]"]))), ())
    assert "groups=[{match:embed,lr:1}] (was [{match:'ndim<2',weight_decay:0},{match:'(up|down).w" in line
    assert refusal_text([*lines, line]).startswith("these keys cannot change when a run resumes, or only with --force:")


def test_what_may_change_on_resume() -> None:
    before = as_typed(compose(["optimizer._target_=a.B", "optimizer.lr=1", "schedule._target_=a.C", "schedule.n=1"]))

    def refused(*overrides: str) -> str:
        words = ["optimizer._target_=a.B", "optimizer.lr=1", "schedule._target_=a.C", "schedule.n=1", *overrides]
        differing = changes(before, as_typed(compose(words)))
        return "\n".join(refusals(differing, {"optimizer.rho", "optimizer.lr"}))

    assert refused("optimizer.rho=1", "optimizer.lr=2") == ""
    assert "optimizer._target_=a.D (was a.B)" in refused("optimizer._target_=a.D")
    assert "stored by group" in refused("optimizer.groups=[{match: a, lr: 1}]")
    assert "stored by group" in refused("optimizer.weight_decay=0.1")
    assert "continues from its saved state" in refused("schedule.n=2")
