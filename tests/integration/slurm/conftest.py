"""One Slurm cluster for all tests of a session, and projects on its shared file system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lab.slurm.cluster import Cluster, lacking
from lab.slurm.project import Project


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := lacking():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "shared").start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def projects(slurm: Cluster) -> Callable[..., Project]:
    """A new project, rendered with settings in place of the usual ones."""

    def make(name: str, **settings: Any) -> Project:
        project = Project(slurm, slurm.folder / name)
        project.render(**settings)
        return project

    return make
