"""Train one run: steps, loss, checkpoints, processes."""

from tra.training.checkpoint import DamagedError
from tra.training.device import pick_device
from tra.training.distributed import RankLostError, is_first
from tra.training.interruptions import DiskFullError, NonFiniteError
from tra.training.start import train
from tra.training.trainer import Progress, Result, Trainer

__all__ = [
    "DamagedError",
    "DiskFullError",
    "NonFiniteError",
    "Progress",
    "RankLostError",
    "Result",
    "Trainer",
    "is_first",
    "pick_device",
    "train",
]
