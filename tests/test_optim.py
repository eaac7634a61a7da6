"""Optimizers against the delay, held to torch's own and to their published rule."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, NAdam, Optimizer
from torch.optim.lr_scheduler import StepLR

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.models import build
from pd2bw_fx.optim import MuonWithAdamW, heads_to_adamw, nadamw
from pd2bw_fx.optimizer_names import optimizer_named
from pd2bw_fx.runtime.reference import train_reference
from tests.stages import split_of_our_own

SHAPES = {"embedding": (7, 4), "matrix": (4, 6), "bias": (6,), "filters": (3, 2, 2, 2)}
GRADIENTS = 6
WHATEVER = nn.Parameter(torch.empty(0))


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}


def gradients() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(GRADIENTS)]


def step(held: dict[str, nn.Parameter], gradient: dict[str, Tensor], *optimizers: Optimizer) -> None:
    for name, parameter in held.items():
        parameter.grad = gradient[name].clone()
    for optimizer in optimizers:
        optimizer.step()


def test_nadamw_is_nadam_with_a_long_first_moment_and_decay_beside_it() -> None:
    mine, torchs, by_rule = parameters(), parameters(), parameters()
    ours = nadamw(mine.values(), lr=0.01, weight_decay=0.1)
    theirs = NAdam(
        torchs.values(), lr=0.01, betas=(0.99, 0.999), weight_decay=0.1, decoupled_weight_decay=True
    )
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in by_rule.items()}
    product = 1.0

    for number, gradient in enumerate(gradients(), start=1):
        step(mine, gradient, ours)
        step(torchs, gradient, theirs)
        # Dozat 2016: the first moment's share grows to beta1; the step looks one update ahead.
        now, following = (0.99 * (1 - 0.5 * 0.96 ** (t * 4e-3)) for t in (number, number + 1))
        product *= now
        for name, parameter in by_rule.items():
            first, second = moments[name]
            first.mul_(0.99).add_(0.01 * gradient[name])
            second.mul_(0.999).add_(0.001 * gradient[name] ** 2)
            ahead = following * first / (1 - product * following)
            ahead += (1 - now) * gradient[name] / (1 - product)
            size = (second / (1 - 0.999**number)).sqrt() + 1e-8
            parameter.data = parameter.data * (1 - 0.01 * 0.1) - 0.01 * ahead / size

    for name in SHAPES:
        assert torch.equal(mine[name], torchs[name])
        torch.testing.assert_close(mine[name], by_rule[name], rtol=1e-5, atol=1e-6)


def test_muon_with_adamw_is_torchs_muon_on_matrices_and_its_adamw_on_the_rest() -> None:
    mine, theirs = parameters(), parameters()
    groups = [
        {"params": [mine["matrix"], mine["bias"], mine["filters"]], "weight_decay": 0.2},
        {"params": [mine["embedding"]], "kind": "adamw"},
    ]
    ours = MuonWithAdamW(groups, lr=0.02, betas=(0.8, 0.9))
    muon = Muon([theirs["matrix"]], lr=0.02, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    decayed = {"params": [theirs["bias"], theirs["filters"]], "weight_decay": 0.2}
    adamw = AdamW([decayed, {"params": [theirs["embedding"]]}], lr=0.02, betas=(0.8, 0.9), weight_decay=0.01)
    schedules = [StepLR(each, step_size=2, gamma=0.5) for each in (ours, muon, adamw)]

    for number, gradient in enumerate(gradients()):
        step(mine, gradient, ours)
        step(theirs, gradient, muon, adamw)
        for schedule in schedules:
            schedule.step()
        if number == GRADIENTS // 2:  # what a checkpoint does
            kept = ours.state_dict()
            ours = MuonWithAdamW(groups, lr=0.5, betas=(0.8, 0.9))
            ours.load_state_dict(kept)
            schedules[0].optimizer = ours

    for name in SHAPES:
        assert torch.equal(mine[name], theirs[name]), name


def test_muon_with_adamw_takes_groups_later_and_is_copied_as_any_optimizer() -> None:
    given, later, copied = parameters(), parameters(), parameters()
    whole = MuonWithAdamW(given.values(), lr=0.02, betas=(0.8, 0.9))
    grown = MuonWithAdamW([later["matrix"]], lr=0.02, betas=(0.8, 0.9))
    grown.add_param_group({"params": [later[name] for name in SHAPES if name != "matrix"]})
    kept = MuonWithAdamW(copied.values(), lr=0.02, betas=(0.8, 0.9))

    for number, gradient in enumerate(gradients()):
        step(given, gradient, whole)
        step(later, gradient, grown)
        step(copied, gradient, kept)
        if number == GRADIENTS // 2:
            copied, kept = copy.deepcopy((copied, kept))
            copied, kept = pickle.loads(pickle.dumps((copied, kept)))

    for name in SHAPES:
        assert torch.equal(later[name], given[name]), name
        assert torch.equal(copied[name], given[name]), name
    with pytest.raises(ValueError, match="more than one parameter group"):
        grown.add_param_group({"params": later["bias"]})


def test_muon_takes_no_closure() -> None:
    with pytest.raises(ValueError, match="takes no closure"):
        MuonWithAdamW([nn.Parameter(torch.ones(2, 2))]).step(lambda: torch.zeros(()))


def test_embeddings_and_heads_are_left_to_adamw_by_the_graph() -> None:
    pipe = split_of_our_own("gpt", cluster=1)
    kind = heads_to_adamw(pipe.graph)

    kinds = {name: kind(name, WHATEVER)["kind"] for name in pipe.graph.parameters}

    assert kinds["tokens.weight"] == kinds["positions.weight"] == "adamw"
    assert {kinds[name] for name in kinds if name.startswith("blocks.")} == {"muon"}
    untied = split_of_our_own("mlp", cluster=1).graph
    assert [n for n in untied.parameters if heads_to_adamw(untied)(n, WHATEVER)["kind"] == "adamw"] == [
        "head.weight"
    ]


def test_a_name_that_is_no_optimizer_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"'lion'; expected adamw, nadamw, muon, adam, sgd or module:callab"):
        optimizer_named("lion", None, lambda name: functools.partial(AdamW))


class Rebinding(Optimizer):
    """Gives its parameters other memory, as hand-written optimizers do."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - group["lr"] * parameter.grad


@pytest.mark.parametrize("method", ["2bw", "1f1b"])
def test_an_optimizer_may_give_its_parameters_other_memory(method: str) -> None:
    torch.manual_seed(0)
    model = build("mlp")
    batches = [tuple(torch.cat([t] * 2) for t in model.example_inputs()) for _ in range(3)]
    pipe = pd2bw_fx.split(model, cluster=2, costs="analytic", method=method)
    optimizer = functools.partial(Rebinding, lr=0.1)

    found = pipe.train_local(batches, optimizer=optimizer, microbatches_per_update=2)

    rule = "2bw" if method == "2bw" else "synchronous"
    expected = train_reference(model, batches, optimizer=optimizer, microbatches_per_update=2, method=rule)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    for name, tensor in expected.state_dict.items():
        assert torch.allclose(pipe.state_dict()[name], tensor, atol=1e-6), name
