"""What `umbel deploy` says before Ray has started, and of what Ray tells it; no Ray is needed."""

import pytest
from umbel.lang.errors import ParameterError
from umbel.server.ray.command import DeploySettings, deploy_settings, last_error, missing_room


@pytest.mark.parametrize(("given", "bounds"), [("1", (1, 1)), ("3", (3, 3)), ("1:8", (1, 8)), ("64", (64, 64))])
def test_replicas_are_a_number_or_two_bounds(given: str, bounds: tuple[int, int]) -> None:
    assert DeploySettings(replicas=given).bounds == bounds


@pytest.mark.parametrize("given", ["3:1", "0", "0:2", "65", "two", "1:", "1:2:3", ""])
def test_other_bounds_are_refused_with_what_to_write(given: str) -> None:
    with pytest.raises(ParameterError, match="write N or MIN:MAX, of 1 to 64"):
        DeploySettings(replicas=given).bounds  # noqa: B018  # it raises


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--placement", "best"], "write one of added-delay"),
        (["--gpus-per-replica", "1", "--tensor-parallel", "2"], "write --gpus-per-replica 2"),
    ],
)
def test_settings_that_cannot_hold_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        deploy_settings(["oracle", *given], {})


def missing(nodes: list[dict[str, float]], **settings: float | str) -> str:
    return missing_room(DeploySettings(**settings), nodes)  # type: ignore[arg-type]  # by name


SMALL, LARGE = {"CPU": 2.0}, {"CPU": 16.0, "GPU": 4.0}


def test_replicas_that_nodes_have_room_for_are_deployed() -> None:
    assert missing([SMALL], replicas="2") == ""
    assert missing([SMALL], replicas="2:8") == ""
    assert missing([SMALL], replicas="20", cpus_per_replica=0.1) == ""
    assert missing([SMALL], replicas="64", cpus_per_replica=0.0) == ""
    assert missing([SMALL, LARGE], replicas="4", gpus_per_replica=1.0) == ""


def test_a_replica_has_its_parts_on_one_node() -> None:
    assert "there is room for 0 " in missing([SMALL, SMALL], cpus_per_replica=3.0)
    assert "there is room for 2 " in missing([SMALL, SMALL, LARGE], replicas="3", gpus_per_replica=2.0)
    assert "there is room for 2 (nodes: 2 CPUs and 0 GPUs)" in missing([SMALL], replicas="4:8")


def test_a_gpu_that_nobody_has_is_named() -> None:
    assert missing([SMALL], gpus_per_replica=1.0).startswith(
        "--gpus-per-replica 1: Ray finds no GPU here; leave it out"
    )


def test_the_error_of_a_replica_is_found_in_the_message_of_ray() -> None:
    message = """The deployment failed to start 3 times in a row. Error:
ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica:umbel:Replica.initialize_and_get_metadata() (pid=1)
RuntimeError: Traceback (most recent call last):
  File "front.py", line 106, in start
    raise self._broken()
umbel.ModelError: nobody/nothing is not on this machine: ConnectError
"""
    assert last_error(message) == "ModelError: nobody/nothing is not on this machine: ConnectError"
    assert last_error("Deployment has replicas that wait") == ""
