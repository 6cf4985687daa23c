"""Tensors in the files of `torch.distributed.checkpoint` (DCP), read without running code that a file may hold."""
import contextlib
import hashlib
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from fspeed.together import world_size

INDEX = ".metadata"
AS_THEY_ARE = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


def write_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Write every rank's tensors, and sync them; a key that several ranks have is written by one of them.

    Args:
        directory: where; it is there.
        tensors: equal on all ranks that have the same key.

    Raises:
        What writing raises on any rank, on all.

    Cost: a few messages of all keys; one copy of one tensor at a time on the CPU.
    """
    writer, planner = dcp.FileSystemWriter(directory), dcp.DefaultSavePlanner(**AS_THEY_ARE)
    with plain_errors():
        dcp.save(tensors, storage_writer=writer, planner=planner, no_dist=world_size() == 1)


def seal(directory: Path) -> str:
    """The SHA-256 of the index of all ranks' tensors in a directory."""
    return hashlib.sha256((directory / INDEX).read_bytes()).hexdigest()


def read_tensors(directory: Path, tensors: dict[str, Tensor], sealed: str) -> None:
    """Read tensors by their keys into those that are given.

    Args:
        directory: where `write_tensors` wrote.
        tensors: of the shapes and dtypes that were written; DCP casts others in silence.
        sealed: what `seal` said.

    Raises:
        Exception: of whatever kind, if anything is wrong with the files.

    Cost: each rank reads for itself.
    """
    if seal(directory) != sealed:
        raise ValueError(f"{INDEX} is not what was written")
    reader = Reader(directory, Unpickler(io.BytesIO((directory / INDEX).read_bytes())).load())
    reader.refuse_truncated(tensors)
    with plain_errors():
        dcp.load(tensors, storage_reader=reader, planner=dcp.DefaultLoadPlanner(**AS_THEY_ARE), no_dist=True)


class Reader(dcp.FileSystemReader):
    """DCP's reader, with an index that was read before: its own would be unpickled without limits."""

    def __init__(self, directory: Path, index: Any):
        super().__init__(directory)
        self.directory, self.index = directory, index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self.index

    def refuse_truncated(self, tensors: dict[str, Tensor]) -> None:
        """Raise if a file of the tensors is missing or too short."""
        ends: dict[str, int] = {}
        for at, where in self.index.storage_data.items():
            if at.fqn in tensors:
                ends[where.relative_path] = max(ends.get(where.relative_path, 0), where.offset + where.length)
        for name, end in ends.items():
            if Path(name).name != name or not (self.directory / name).is_file():
                raise ValueError(f"{name} is missing")
            if (size := (self.directory / name).stat().st_size) < end:
                raise ValueError(f"{name} has {size} bytes of {end}")


class Unpickler(pickle.Unpickler):
    """Makes the records of DCP's index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{INDEX} names {module}.{name}, which no checkpoint of tensors does; do not trust it")


KNOWN = {       # not BytesStorageMetadata: DCP unpickles such entries without limits, and there are none here
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), *(
        ("torch.distributed.checkpoint.metadata", name) for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What a rank raised in place of DCP's own exception, which is no `Exception`; no warning that there is one process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as failure:
        rank, (error, _) = next(iter(failure.failures.items()))
        error.add_note(f"(on rank {rank})")
        raise error from None
