"""The recipes whose ranks have unequal batches, against one process that has the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from documents import ROOT, name_of, run_example, titled

torch = pytest.importorskip("torch")

PAGE = ROOT / "docs" / "recipes" / "trainings.md"
SOURCES = {"schnet.py": (ROOT / "examples" / "schnet.py").read_text(encoding="utf-8"), **titled(PAGE)}


def loss_of_atoms(recipe: ModuleType, model: torch.nn.Module, graphs: list) -> torch.Tensor:
    """The mean over atoms, graph by graph."""
    errors = [model(*recipe.together([each])[:3]) - each[2] for each in graphs]
    return torch.cat(errors).square().mean()


def loss_of_tokens(recipe: ModuleType, model: torch.nn.Module, texts: list) -> torch.Tensor:
    """The mean over tokens, text by text, without any padding."""
    logits = [model(text[None, :-1])[0] for text in texts]
    return torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat([text[1:] for text in texts]))


RECIPES: list[tuple[str, str, Callable[..., torch.optim.Optimizer], Callable[..., torch.Tensor]]] = [
    ("schnet.py", "graphs", lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss_of_atoms),
    ("text.py", "texts", lambda parameters: torch.optim.Adam(parameters, lr=1e-2), loss_of_tokens),
]


@pytest.mark.parametrize(("file", "data", "make", "loss_of"), RECIPES, ids=[each[0] for each in RECIPES])
def test_unequal_batches_make_the_weights_of_one_process(file: str, data: str, make, loss_of) -> None:
    """The program as printed, on any number of ranks: each atom and token counts the same in each step."""
    recipe = run_example(PAGE, f"{name_of(PAGE)}:{file}", SOURCES[file])

    torch.manual_seed(0)
    model = type(recipe.model)().double()
    optimizer = make(model.parameters())
    samples = getattr(recipe, data)
    for begin in range(0, len(samples), 8):
        optimizer.zero_grad()
        loss_of(recipe, model, samples[begin : begin + 8]).backward()
        optimizer.step()
    torch.testing.assert_close([*recipe.model.parameters()], [*model.parameters()], rtol=1e-9, atol=1e-9)
