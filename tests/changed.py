"""Another version of the package, in which ``sinks`` means something else."""

from contextlib import contextmanager

import numpy as np
import pytest

import sparse_flash as sf


@contextmanager
def other_sinks():
    """Within it, ``sinks(n)`` keeps n + 1 tokens."""

    def row_runs(self, q):
        return np.zeros_like(q)[..., None], np.full_like(q, self.tokens + 1)[..., None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sf.sinks, "row_runs", row_runs)
        sf.clear_caches()
        yield
    sf.clear_caches()
