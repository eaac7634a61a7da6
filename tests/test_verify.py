"""What a comparison of stages and model lets pass: roundings that the model carries on, nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import InputError, VerificationError
from pd2bw_fx.program import set_fast_path

BY_TYPE = 2e-5


class Cancelling(nn.Module):
    """Every layer reads what was normalised over two samples, whose gradients all but cancel there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = total = self.norm(self.first(x))
        for layer in self.layers:
            total = total + layer(total).sin() * hidden
        return total.square().mean()


def stages(seed: int) -> tuple[Cancelling, pd2bw_fx.Pipeline]:
    """Three stages that all read the normalised value, compared by nobody yet."""
    torch.manual_seed(seed)
    model, x = Cancelling(), torch.randn(2, 8)
    where = {f"layers.{layer}": layer // 2 for layer in range(6)}
    constraints = pd2bw_fx.Constraints(stage_of=where)
    pipe = pd2bw_fx.split(
        model, x, cluster=3, num_stages=3, costs="analytic", check=False, constraints=constraints
    )
    return model, pipe


def is_refused(pipe: pd2bw_fx.Pipeline, **options: float) -> bool:
    try:
        pipe.verify(**options)
    except VerificationError:
        return True
    return False


def test_a_rounding_that_the_model_carries_on_as_far_is_no_fault() -> None:
    pipes = [stages(seed)[1] for seed in range(8)]

    assert any(is_refused(pipe, tolerance=BY_TYPE) for pipe in pipes)
    assert not any(is_refused(pipe) for pipe in pipes)


@pytest.mark.parametrize(("written", "instead"), [(".sin()", ".cos()"), (".sin()", ".sin() * 1.001")])
def test_what_is_wrong_is_found_in_such_a_model_too(written: str, instead: str, tmp_path: Path) -> None:
    model, pipe = stages(1)
    pipe.save(tmp_path)
    source = tmp_path / "stage_2.py"
    source.write_text(source.read_text().replace(written, instead))

    edited = pd2bw_fx.load(tmp_path, edited=True)

    assert instead in edited.stages[2].source
    with pytest.raises(VerificationError, match="differs from the model's"):
        edited.verify(model, example_args=(torch.randn(2, 8),))


class Stepping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.heaviside(self.first(x), x)).sum()


class Overwriting(Stepping):
    """Overwrites what sigmoid saved for its backward, so that the model itself has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        shares = self.first(x).sigmoid()
        shares[:, 0] = shares[:, 0] * 2
        return self.last(shares).sum()


class Noisy(nn.Module):
    """Noise of no layer's can be drawn on the first stage, before what the layers draw."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(torch.tanh(self.first(x)))
        return (self.last(hidden) + torch.randn(x.shape[0], 3, 6)).square().mean()


def test_draws_in_another_order_are_compared_without_dropout() -> None:
    pipe = pd2bw_fx.split(Noisy(), torch.randn(4, 3, 6), cluster=2, costs="analytic", check=False)
    names = list(pipe.plan.stages[0].operators + pipe.plan.stages[1].operators)
    noise = next(name for name in names if "randn" in name)
    norm = names.index(next(name for name in names if name.startswith("layer_norm")))
    data = pipe.plan.to_json()
    data["stages"][0]["operators"] = [*(name for name in names[:norm] if name != noise), noise]
    data["stages"][1]["operators"] = [name for name in names[norm:] if name != noise]
    edited = pd2bw_fx.split(pipe, cluster=2, plan=pd2bw_fx.Plan.from_json(data), check=False)

    verification = edited.verify()
    assert verification.exact
    assert not verification.with_random_numbers


@pytest.mark.parametrize(
    ("model", "costs", "reason"),
    [
        (Stepping, "analytic", "derivative for aten::heaviside is not implemented"),
        (Stepping, "measured", "derivative for aten::heaviside is not implemented"),
        (Overwriting, "analytic", "modified by an inplace operation"),
        (Overwriting, "measured", "modified by an inplace operation"),
    ],
)
def test_a_model_without_a_backward_of_its_own_is_told_so(
    model: type[nn.Module], costs: Literal["analytic", "measured"], reason: str
) -> None:
    with pytest.raises(InputError, match=f"the model's own backward raises.*{reason}") as raised:
        pd2bw_fx.split(model(), torch.randn(4, 4), cluster=2, costs=costs)

    assert "\n" not in str(raised.value)


class Reseeding(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "manual_seed":
            torch.manual_seed(3)
            noise = torch.rand(4)
        elif self.how == "fork_rng":
            with torch.random.fork_rng():
                noise = torch.rand(4)
            noise = noise - torch.rand(4)
        else:
            state = torch.get_rng_state()
            noise = torch.rand(4)
            torch.set_rng_state(state)
            noise = noise - torch.rand(4)
        return self.last(self.first(x) * noise).square().mean()


@pytest.mark.parametrize("how", ["manual_seed", "fork_rng", "set_rng_state"])
def test_a_forward_that_sets_the_generator_is_named(how: str) -> None:
    with pytest.raises(VerificationError, match=rf"in its forward \(test_verify.py:\d+: .*{how}\("):
        pd2bw_fx.split(Reseeding(how), torch.randn(4, 4), cluster=2, costs="analytic")


class Labelled(nn.Module):
    """nanoGPT's forward: a loss of its own where it is given targets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        found: Tensor = self.last(self.first(x).relu())
        return found if targets is None else nn.functional.mse_loss(found, targets)


def test_what_a_loss_function_compares_with_is_not_given_to_an_argument_of_the_same_name(
    tmp_path: Path,
) -> None:
    model, x, y = Labelled(), torch.randn(3, 4), torch.randn(3, 4)
    loss = {"loss_fn": nn.functional.l1_loss, "example_targets": y}
    pipe = pd2bw_fx.split(model, x, cluster=2, num_stages=2, costs="analytic", **loss)
    pipe.save(tmp_path / "saved")
    loaded = pd2bw_fx.load(tmp_path / "saved")

    assert loaded.run((x, y))["loss"].item() == nn.functional.l1_loss(model(x), y).item()
    assert loaded.verify(model, example_args=x, **loss).exact
    with pytest.raises(InputError, match=r"or pass example_args, example_kwargs and loss_fn"):
        loaded.verify(model)


class Encoding(nn.Module):
    """Its loss is a mean of all positions, or of those that the mask leaves."""

    def __init__(self, *, leaves_out: bool, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, **options), nn.Linear(8, 8)
        self.leaves_out = leaves_out

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        losses = self.head(self.encoder(x, src_key_padding_mask=padded)).square().mean(-1)
        return losses.masked_fill(padded, 0.0).mean() if self.leaves_out else losses.mean()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("leaves_out", "options", "is_told"),
    [(False, {}, True), (True, {}, False), (False, {"enable_nested_tensor": False}, False)],
)
def test_padded_positions_that_torchs_fast_path_sets_to_zero_are_told_of(
    leaves_out: bool, options: dict[str, bool], is_told: bool
) -> None:
    torch.manual_seed(0)
    model, padded = Encoding(leaves_out=leaves_out, **options), torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 3:] = True
    pipe = pd2bw_fx.split(model, (torch.randn(3, 5, 8), padded), cluster=2, costs="analytic")
    assert pipe.trace_report is not None
    told = [note for note in pipe.trace_report.notes if note.startswith("in evaluation without gradients")]
    assert ["'loss' is another one, by " in note for note in told] == [True] * is_told
    assert model.training


class Preferring(nn.Module):
    """Whether it is above its frozen reference, from which it begins, anywhere."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = layer, copy.deepcopy(layer).requires_grad_(False)

    def train(self, mode: bool = True) -> Preferring:
        super().train(mode)
        self.reference.eval()
        return self

    def forward(self, x: Tensor, padded: Tensor) -> dict[str, Tensor]:
        found = self.policy(x, src_key_padding_mask=padded)
        with torch.no_grad():
            before = self.reference(x, src_key_padding_mask=padded)
        return {"loss": (found - 2 * before).square().mean(), "above": (found > before).any().float()}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
def test_the_fast_path_of_a_part_in_evaluation_mode_is_no_difference_where_it_rounds_alone() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[1, 3:] = True
    batch = torch.randn(3, 5, 8), padded

    model = Preferring(layer).train()
    assert model(*batch)["above"] > 0  # by rounding alone
    verification = pd2bw_fx.split(model, batch, cluster=2, costs="analytic").verify()
    with set_fast_path(on=False):
        is_same_elsewhere = model(*batch)["above"] == 0
    # Some CPUs round products by where operands lie in memory: there the layers differ without the path too.
    assert verification.exact or not is_same_elsewhere
    assert torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(VerificationError, match=r"not without torch's fast path.*=False"):
        pd2bw_fx.split(
            Preferring(nn.TransformerEncoder(layer, 1)).train(), batch, cluster=2, costs="analytic"
        )


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).minimum(torch.tensor(0.5))).sum()


def test_a_number_that_stands_in_the_code_is_no_buffer_of_a_loaded_pipeline(tmp_path: Path) -> None:
    model = Limited()
    pipe = pd2bw_fx.split(model, torch.randn(3, 8), cluster=2, num_stages=2, costs="analytic", check=False)
    pipe.save(tmp_path / "saved")

    assert pd2bw_fx.load(tmp_path / "saved").verify(model).exact


def test_an_example_of_a_size_that_was_not_traced_is_refused_as_a_batch_is() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)).square().sum(1).topk(int(0.5 * x.shape[0]))[0].mean()

    pipe = pd2bw_fx.split(Half(), torch.randn(8, 4), cluster=2, costs="analytic")
    with pytest.raises(InputError, match="has 6 samples; the model was traced for 8 only"):
        pipe.verify(example={"x": torch.randn(6, 4)})


def test_an_assertion_without_words_in_evaluation_is_told_by_its_kind() -> None:
    class Training(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                raise AssertionError
            return super().forward(x).square().mean()

    pipe = pd2bw_fx.split(Training(8, 8), torch.randn(4, 8), cluster=1, costs="analytic")

    assert pipe.trace_report is not None
    assert "the model cannot be run on the example inputs: AssertionError" in pipe.trace_report.evaluation


class MakingALayer(nn.Module):
    """Draws the weights of a layer at its first call, as attention that is chosen by the length of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.is_chosen = nn.Linear(8, 8), nn.Dropout(0.5), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_chosen:
            chosen = nn.Linear(8, 8)
            chosen.weight, chosen.bias = self.layer.weight, self.layer.bias
            self.layer, self.is_chosen = chosen, True
        return self.drop(self.layer(x)).square().mean()


def test_a_model_that_draws_more_than_its_stages_is_told_to_be_called_before() -> None:
    torch.manual_seed(0)
    model, x = MakingALayer(), torch.randn(4, 8)
    with pytest.raises(VerificationError, match=r"draws other random numbers .* call it once before"):
        pd2bw_fx.split(model, x, cluster=1, costs="analytic")
    model(x)
    assert pd2bw_fx.split(model, x, cluster=1, costs="analytic").verify().exact


class Table(nn.Module):
    """Its rows have a category, and two numbers that are no category."""

    def __init__(self) -> None:
        super().__init__()
        self.category, self.head = nn.Embedding(3, 4), nn.Linear(6, 1)

    def forward(self, rows: Tensor) -> Tensor:
        known = self.category(rows[:, 0].long())
        return self.head(torch.cat([known, rows[:, 1:]], 1))  # type: ignore[no-any-return]


def test_columns_of_a_table_keep_their_own_values_in_a_full_check() -> None:
    rows = torch.cat([torch.arange(6.0).remainder(3)[:, None], torch.randn(6, 2) * 9], 1)

    pipe = pd2bw_fx.split(Table(), rows, cluster=2, costs="analytic", check="full")

    assert pipe.graph.batch_symbol is not None


class Totals(nn.Module):
    """Looks up sums over the batch, which are too large for other batches."""

    def __init__(self) -> None:
        super().__init__()
        self.totals, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.totals(words.sum(0))).square().mean()  # type: ignore[no-any-return]


def test_a_model_that_takes_nothing_that_a_full_check_makes_up_is_told_of_the_other_one() -> None:
    words = torch.full((4, 3), 2)

    with pytest.raises(InputError, match=r"(?s)check='full' makes up.*index out of range.*check='fast'"):
        pd2bw_fx.split(Totals(), words, cluster=2, costs="analytic", check="full")
