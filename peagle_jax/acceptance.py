"""How many drafts were accepted, from the rounds that the emitted tokens come from."""

import numpy as np


def count_accepted(emitted_in: np.ndarray, num_drafts: int) -> tuple[int, np.ndarray]:
    """Counts rounds, and the drafts that they contributed.

    A round emits the drafts that it accepted and one token of the target's own. Tokens that a
    stop or the budget cut off are not in the sequence, so they do not count.

    Args:
      emitted_in: `[n]` int, the round of each token of one sequence, counted from 1; 0 for the
        first, which comes from the prefill.
      num_drafts: K.

    Returns:
      number of rounds that emitted a token, and `[K]` how many of them accepted drafts 0..i.
    """
    _, emitted = np.unique(emitted_in[emitted_in > 0], return_counts=True)  # per round
    accepted = emitted - 1
    return len(emitted), (accepted[:, None] > np.arange(num_drafts)).sum(axis=0)
