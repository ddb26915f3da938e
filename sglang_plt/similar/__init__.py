"""Which stored token sequences hold (nearly) the same tokens as a given one, and where: numpy and nothing else."""

from sglang_plt.similar.align import Run, align
from sglang_plt.similar.index import Candidate, FragmentIndex

__all__ = ["Candidate", "FragmentIndex", "Run", "align"]
