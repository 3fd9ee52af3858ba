"""Carriers between two processes: what is read is what was published, whole or not at all, whoever dies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from child import Child, digest_of, tensors

from rollart.backends.weights import Reader, Writer, open_reader, open_writer
from rollart.backends.weights.memory import checksum
from rollart.backends.weights.settings import WeightsSettings
from rollart.core.errors import ConfigError, EngineLost, TrainerLost
from rollart.core.types import Manifest

CARRIERS = ["file", "collective", "mooncake"]
LEASE_SECONDS = 1
MASTER = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Master:
    """The store's master, that can be killed and started again on its port."""

    def __init__(self) -> None:
        self.port, self._metrics = free_port(), free_port()
        self.start()

    def start(self) -> None:
        # The wheel's wrapper starts the binary as a child of its own: a group, so that a kill reaches both.
        self.process = subprocess.Popen([MASTER or "", f"--rpc_port={self.port}", f"--metrics_port={self._metrics}",
                                         f"--default_kv_lease_ttl={LEASE_SECONDS * 1000}"],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the master did not start")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def told(reader: Reader, manifest: Manifest) -> str:
    """What a get says, or ''."""
    try:
        reader.get(manifest)
    except EngineLost as lost:
        return str(lost)
    return ""


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    pytest.importorskip("mooncake.store", reason="mooncake-transfer-engine-non-cuda or libibverbs1 is not installed",
                        exc_type=ImportError)
    master = Master()
    yield master
    master.kill()


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> WeightsSettings:
    more: dict[str, Any] = {}
    if request.param == "mooncake":
        more = {"address": f"127.0.0.1:{request.getfixturevalue('master').port}", "segment_mb": 64}
    return WeightsSettings(carrier=request.param, folder=str(tmp_path), bucket_mb=1, deadline_seconds=20.0, **more)


@pytest.fixture
def writer(settings: WeightsSettings) -> Iterator[Writer]:
    writer = open_writer(settings)
    yield writer
    writer.close()


@pytest.fixture
def reader(settings: WeightsSettings) -> Iterator[Child]:
    child = Child("reader", settings)
    yield child
    child.kill()


each = pytest.mark.parametrize("settings", CARRIERS, indirect=True)
only_file = pytest.mark.parametrize("settings", ["file"], indirect=True)
only_collective = pytest.mark.parametrize("settings", ["collective"], indirect=True)
only_mooncake = pytest.mark.parametrize("settings", ["mooncake"], indirect=True)


@each
def test_another_process_reads_what_was_put_although_training_went_on(settings, writer, reader):
    for version in range(3):
        state = tensors(version)
        before = {name: tensor.clone() for name, tensor in state.items()}
        manifest = writer.put(version, state)
        for tensor in state.values():
            tensor.zero_()
        assert reader.ask(manifest) == checksum(before)
        assert manifest.nbytes == sum(tensor.nbytes for tensor in before.values())
        assert reader.ask(manifest) == checksum(before)  # an engine that restarts reads it again
    again = writer.put(2, tensors(9))
    assert again.location != manifest.location
    assert reader.ask(again) == digest_of(9)
    assert reader.ask(replace(again, checksum="0" * 32)).startswith("EngineLost: ")


@each
def test_what_was_read_stays_after_drop_and_close(settings, writer):
    reader = open_reader(settings)
    manifest = writer.put(1, tensors(1))
    got = reader.get(manifest)
    writer.drop(manifest)
    writer.drop(manifest)
    following = writer.put(2, tensors(2))
    assert checksum(reader.get(following)) == digest_of(2)
    reader.close()
    writer.drop(following)
    assert checksum(got) == digest_of(1)


@pytest.mark.parametrize("settings", ["file", "collective"], indirect=True)
def test_dropped_weights_are_gone_at_once(settings, writer, reader):
    manifest = writer.put(1, tensors(1))
    writer.drop(manifest)
    assert "EngineLost: weights of version 1 are" in reader.ask(manifest)


@only_mooncake
def test_the_store_forgets_dropped_weights_when_their_leases_have_run_out(settings, writer):
    reader = open_reader(replace(settings, deadline_seconds=2.0))
    manifest = writer.put(1, tensors(1))
    reader.get(manifest)
    writer.drop(manifest)
    writer.put(2, tensors(2))
    assert told(reader, manifest) == ""  # the lease holds it, and no put waits for that
    time.sleep(LEASE_SECONDS + 0.5)
    writer.put(3, tensors(3))
    assert "not in the store" in told(reader, manifest)


@only_file
def test_torn_and_corrupted_files_are_refused_and_partial_ones_never_seen(settings, writer, reader):
    manifest = writer.put(1, tensors(1))
    file = Path(manifest.location) / "model.safetensors"
    whole = file.read_bytes()
    for content, said in ((whole[:-1], "bytes where version 1 has"), (whole[:500], "torn"), (b"", "torn"),
                          (whole[:100] + b"x" + whole[101:], "torn"),
                          (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "bucket 4 of 4 has another checksum"),
                          (whole[:20_000] + b"xyz" + whole[20_003:], "bucket 1 of 4 has another checksum")):
        file.write_bytes(content)
        assert said in reader.ask(manifest)
    file.write_bytes(whole)
    assert reader.ask(manifest) == digest_of(1)
    with pytest.raises(ValueError, match="no carrier takes"):
        writer.put(2, {"a": torch.zeros(2, dtype=torch.complex64)})
    assert sorted(path.name for path in Path(manifest.location).parent.iterdir()) == [".made-by-rollart", "v1-0"]


@only_file
def test_its_files_are_safetensors_that_others_read(settings, writer):
    from safetensors.torch import load_file

    manifest = writer.put(1, tensors(1))
    assert checksum(load_file(Path(manifest.location) / "model.safetensors")) == digest_of(1)


@only_file
def test_a_full_disk_is_an_error_of_the_learner_and_leaves_nothing(settings, writer, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(TrainerLost, match=r"cannot be written to .*: No space left"):
        writer.put(1, tensors(1))
    assert not list(Path(settings.folder).glob("rollart-weights-*/v*"))


@only_file
def test_what_a_killed_writer_left_is_removed_after_the_next_publish_and_not_before(settings):
    child = Child("writer", settings)
    manifest = child.ask(1, 1)
    living = open_writer(settings)
    kept = living.put(5, tensors(5))
    assert Path(manifest.location).exists()  # it lives
    child.kill()
    following, reader = open_writer(settings), open_reader(settings)
    assert checksum(reader.get(manifest)) == digest_of(1)  # engines that restart still need it
    following.put(2, tensors(2))
    with pytest.raises(EngineLost, match="gone"):
        reader.get(manifest)
    assert checksum(reader.get(kept)) == digest_of(5)
    living.close()
    following.close()
    assert not list(Path(settings.folder).iterdir())


@only_file
def test_nothing_is_removed_but_what_a_dead_writer_made(settings):
    """Folders of other people and programs lie beside it, with any name; their locks are free."""
    folder = Path(settings.folder)
    others = [folder / name for name in ("w", "work", "wtrees1", "rollart-weights-notes", "rollart-weights-1")]
    for other in others:
        other.mkdir(parents=True)
        (other / "thesis.txt").write_text("ten years")
    child = Child("writer", settings)
    left = Path(child.ask(1, 1).location).parent
    child.kill()
    writer = open_writer(settings)
    writer.put(1, tensors(1))
    writer.drop(replace(writer.put(2, tensors(2)), location=str(others[1] / "thesis")))
    assert not left.exists()
    assert [(other / "thesis.txt").read_text() for other in others] == ["ten years"] * 5
    writer.close()
    assert sorted(folder.iterdir()) == sorted(others)


@only_file
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_each_user_has_a_folder_of_their_own_and_that_of_another_is_refused(settings):
    base = Path(tempfile.mkdtemp())
    base.chmod(0o777)
    both = replace(settings, folder=f"{base}/shared-{{uid}}")
    try:
        for user in (64001, 64002):
            os.seteuid(user)
            writer = open_writer(both)
            assert Path(writer.put(1, tensors(1)).location).parent.parent == base / f"shared-{user}"
            writer.close()
            os.seteuid(0)
        os.seteuid(64001)
        with pytest.raises(ConfigError, match="belongs to user 64002, who could exchange what is in it"):
            open_writer(replace(settings, folder=f"{base}/shared-64002"))
    finally:
        os.seteuid(0)
        shutil.rmtree(base)


@pytest.mark.parametrize("settings", ["collective", "mooncake"], indirect=True)
def test_a_corrupted_bucket_is_refused(settings, writer, reader):
    manifest = writer.put(1, tensors(1))
    if settings.carrier == "collective":
        writer._held[manifest.location][2][3_000_000] ^= 1
    else:  # a store that holds other bytes under the key
        other = tensors(1)
        other["layer.12"][0, 0] += 1
        image = writer._newest[1]
        broken = open_writer(settings)
        broken._own = "broken"
        wrong = broken.put(1, other)
        broken._push(f"{wrong.location}x", image, broken._newest[2])
        manifest = replace(manifest, location=f"{wrong.location}x")
    assert "has another checksum" in reader.ask(manifest)
    if settings.carrier == "collective":
        assert reader.ask(writer.put(2, tensors(2))) == digest_of(2)


@only_collective
def test_two_readers_share_a_round_and_the_death_of_one_holds_up_neither_writer_nor_the_other(settings, writer, reader):
    other = Child("reader", settings)
    for version in range(2):
        manifest = writer.put(version, tensors(version))
        for child in (reader, other):
            child.send(manifest)
        assert [child.answer() for child in (reader, other)] == [digest_of(version)] * 2
    assert len(writer._missed) == 2
    big = writer.put(2, {"a": torch.zeros(60_000_000)})
    for child in (reader, other):
        child.send(big)
    time.sleep(0.2)
    other.kill()
    began = time.monotonic()
    assert writer.put(3, tensors(3)).version == 3
    assert time.monotonic() - began < 10
    assert reader.answer() == checksum({"a": torch.zeros(60_000_000)})
    assert reader.ask(writer.put(4, tensors(4))) == digest_of(4)
    late = Child("reader", settings)
    assert late.ask(writer.put(5, tensors(5))) == digest_of(5)
    late.kill()


@only_collective
def test_a_dead_learner_is_an_error_in_time_and_its_successor_is_found(settings):
    settings = replace(settings, deadline_seconds=4.0)
    first, second = Child("writer", settings), Child("writer", settings)
    reader = open_reader(settings)
    manifest = first.ask(1, 1)
    assert checksum(reader.get(manifest)) == digest_of(1)
    first.kill()
    began = time.monotonic()
    with pytest.raises(EngineLost, match=r"version 1 did not come from 127.0.0.1"):
        reader.get(manifest)
    assert time.monotonic() - began < 30
    assert checksum(reader.get(second.ask(2, 2))) == digest_of(2)
    second.kill()


@only_mooncake
def test_a_killed_store_is_one_clear_error_in_time_and_gets_the_newest_weights_again(settings, writer, reader, master):
    manifest = writer.put(1, tensors(1))
    assert reader.ask(manifest) == digest_of(1)
    impatient = open_writer(replace(settings, deadline_seconds=2.0))
    master.kill()
    try:
        began = time.monotonic()
        with pytest.raises(TrainerLost, match=r"version 7 cannot be put into the Mooncake store at .*master does not"):
            impatient.put(7, tensors(7))
        with pytest.raises(EngineLost, match=r"version 1 cannot be read from the Mooncake store"):
            open_reader(replace(settings, deadline_seconds=2.0)).get(manifest)
        assert time.monotonic() - began < 30
        reader.send(manifest)  # it waits for the store to come back
    finally:
        master.start()
    assert reader.answer() == digest_of(1)
    assert reader.ask(writer.put(2, tensors(2))) == digest_of(2)
    assert impatient.put(8, tensors(8)).version == 8
    impatient.close()


@only_mooncake
def test_a_store_that_hangs_is_an_error_within_the_deadline(settings, master):
    writer = open_writer(replace(settings, deadline_seconds=2.0))
    writer.put(1, tensors(1))
    os.killpg(master.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(TrainerLost, match=r"version 2 cannot be put .*: no answer within 2 s"):
            writer.put(2, tensors(2))
        assert time.monotonic() - began < 15
    finally:
        os.killpg(master.process.pid, signal.SIGCONT)
    assert writer.put(3, tensors(3)).version == 3
    writer.close()


@only_mooncake
def test_a_killed_learner_takes_its_memory_along_and_says_so(settings, reader):
    child = Child("writer", settings)
    manifest = child.ask(1, 1)
    assert reader.ask(manifest) == digest_of(1)
    child.kill()
    with pytest.raises(EngineLost, match="version 1 cannot be read"):
        open_reader(replace(settings, deadline_seconds=3.0)).get(manifest)


def test_settings_that_cannot_work_are_refused_in_one_line(tmp_path):
    for wrong in ({"carrier": "pigeon"}, {"bucket_mb": 0}, {"address": "here"}, {"deadline_seconds": 0},
                  {"carrier": "mooncake"}, {"folder": ""}, {"protocol": "udp"}, {"segment_mb": -1}):
        with pytest.raises(ValueError, match="; got "):
            WeightsSettings(**wrong)
    with pytest.raises(ConfigError, match=r"'memory' reaches engines in the learner's own process"):
        open_reader(WeightsSettings())
    writer = open_writer(WeightsSettings())
    assert open_reader(WeightsSettings(), writer) is writer
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"weights.folder = .* cannot be used"):
        open_writer(WeightsSettings(carrier="file", folder=str(tmp_path / "taken")))
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        with pytest.raises(ConfigError, match=r"weights.address = .* cannot be listened on"):
            open_writer(WeightsSettings(carrier="collective", address=f"127.0.0.1:{port}"))


