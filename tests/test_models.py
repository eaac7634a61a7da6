"""The models to try things on can be built, traced, run at any batch size, and learn."""

import pytest
import torch

from pd2bw_fx.models import MODELS, build
from pd2bw_fx.models.text import byte_batches


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_returns_a_finite_loss_that_reaches_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)

    loss = model(*model.example_inputs(batch_size=3))  # type: ignore[operator]
    loss.backward()

    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_can_be_exported_in_training_and_run_at_another_batch_size(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = build(name)
    inputs = model.example_inputs(batch_size=4)  # type: ignore[operator]
    larger = model.example_inputs(batch_size=6)  # type: ignore[operator]
    batch = torch.export.Dim("batch", min=2)
    # Where opt_einsum is installed, torch.export alone takes sizes in torch.einsum for constants.
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", False)

    program = torch.export.export(
        model, inputs, dynamic_shapes=tuple({0: batch} for _ in inputs), strict=False
    )

    torch.manual_seed(1)
    exported = program.module()(*larger)
    torch.manual_seed(1)
    eager = model(*larger)
    torch.testing.assert_close(exported, eager)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_without_labels_every_model_returns_its_logits(name: str) -> None:
    model = build(name)
    *inputs, _labels = model.example_inputs(batch_size=3)  # type: ignore[operator]

    logits = model(*inputs)

    assert logits.shape[0] == 3
    assert logits.dim() >= 2


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_model_learns_its_example_by_heart(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    inputs = model.example_inputs()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt", 1.3), ("bert", 0.336), ("resnet", 0.0256), ("vgg", 0.138)]
)
def test_the_paper_sizes_have_the_papers_numbers_of_parameters(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = build(name, "paper")

    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)


def test_text_batches_are_repeatable_and_targets_are_the_tokens_moved_on_by_one() -> None:
    first = list(byte_batches(batch_size=2, sequence_length=16, seed=1, num_batches=3))
    again = list(byte_batches(batch_size=2, sequence_length=16, seed=1, num_batches=3))

    assert len(first) == 3
    for (tokens, targets), (same_tokens, _) in zip(first, again, strict=True):
        assert torch.equal(tokens, same_tokens)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert tokens.max() < 256
