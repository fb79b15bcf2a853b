"""Learning rates and optimisers."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from peagle_jax.training import TrainSettings, make_optimiser
from peagle_jax.training.step import learning_rate

PARAMETERS = {
    "embedding": jnp.ones((6, 4)),
    "fc": jnp.ones((4, 12)),
    "final_norm.weight": jnp.ones((4,)),
    "mask_hidden": jnp.ones((12,)),
}


def settings_of(**changes: object) -> TrainSettings:
    given: dict[str, object] = {"steps": 100, "warmup_steps": 10, "learning_rate": 0.5}
    return TrainSettings(target="t", data=("d",), output="o", **(given | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "middle"), [("cosine", 0.3), ("linear", 0.3), ("constant", 0.5)]
)
def test_the_rate_rises_and_falls(schedule: str, middle: float) -> None:
    rate = learning_rate(settings_of(schedule=schedule, final_learning_rate=0.2))
    np.testing.assert_allclose([rate(i) for i in (0, 4, 9, 10)], [0.05, 0.25, 0.5, 0.5], rtol=1e-5)
    assert float(rate(55)) == pytest.approx(middle)
    assert float(rate(100)) == pytest.approx(0.5 if schedule == "constant" else 0.1)


def test_without_warm_up_it_begins_at_the_top() -> None:
    assert float(learning_rate(settings_of(warmup_steps=0))(0)) == 0.5


def step(optimiser: optax.GradientTransformation, slope: float) -> dict[str, jnp.ndarray]:
    slopes = {name: jnp.full(x.shape, slope) for name, x in PARAMETERS.items()}
    updates, _ = optimiser.update(slopes, optimiser.init(PARAMETERS), PARAMETERS)
    return optax.apply_updates(PARAMETERS, updates)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_only_matrices_decay(optimiser: str) -> None:
    settings = settings_of(optimiser=optimiser, weight_decay=0.1, warmup_steps=0)
    after = step(make_optimiser(settings), 0.0)
    decayed = {name for name, x in after.items() if float(jnp.abs(x - 1).max()) > 1e-6}
    assert decayed <= {"embedding", "fc"}
    assert "fc" in decayed


def test_muon_takes_matrices_but_no_tables() -> None:
    """A gradient of one rank is orthogonalised: its only singular value becomes about 1."""
    settings = settings_of(optimiser="muon", warmup_steps=0, clip_norm=100.0)
    by_muon = step(make_optimiser(settings), 0.01)
    by_adamw = step(optax.adamw(0.5, 0.9, 0.95, weight_decay=0, nesterov=True), 0.01)
    np.testing.assert_allclose(by_muon["embedding"], by_adamw["embedding"], rtol=1e-3)
    np.testing.assert_allclose(by_muon["mask_hidden"], by_adamw["mask_hidden"], rtol=1e-3)
    moved = np.asarray(1 - by_muon["fc"]) / 0.5
    # Scaled by 0.2 sqrt(max(4, 12)), as an update of AdamW's size.
    assert 0.6 < np.linalg.norm(moved) / (0.2 * np.sqrt(12)) < 1.3
    assert abs(float(by_muon["fc"][0, 0] - by_adamw["fc"][0, 0])) > 0.1


def test_the_same_settings_give_the_same_optimiser() -> None:
    """Else every step would compile."""
    assert make_optimiser(settings_of()) is make_optimiser(settings_of())
