"""Steps in shared memory: whole or not taken, of this run alone, or from another process."""

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.parallel import cluster
from jaxtrain.run import checkpoint_manager
from jaxtrain.supervise import partners, steps_in_memory
from jaxtrain.supervise import parts as parts_lib
from jaxtrain.supervise.parts import Part
from tests.proofs import soak
from tests.support.processes import (
    ROOT,
    at,
    command,
    free_port,
    ids,
    records,
    run,
    step_of,
    wait_for,
)
from tests.support.supervised_runs import (
    ENDLESS,
    outputs_of,
    pid_of_run,
    reaches,
    several,
    starts,
    supervised,
)

NOTE = {"config": "c", "data": "d"}


@pytest.fixture
def parts():
    """Arrays that are split, replicated and offset, of several types."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    return {
        "step": put(jnp.int32(7)),
        "w": put(jnp.arange(64.0).reshape(8, 8), "data", "model"),
        "half": put(jnp.arange(24, dtype=jnp.bfloat16).reshape(2, 12), "model"),
        "flags": put(jnp.arange(3) > 0),
        "none": put(jnp.zeros((0, 4))),
    }


def make(folder, parts, run="run"):
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), parts
    )
    folder.mkdir(exist_ok=True)
    made = steps_in_memory.Memory(str(folder), run, abstract)
    made.reserve()
    return made


def save(made, parts, *steps):
    for step in steps:
        changed = {**parts, "step": parts["step"] + step, "w": parts["w"] * step}
        made.save(step, changed, {**NOTE, "history": {"offset": step}})
    made.close()


def test_the_newest_whole_step_comes_back_bit_for_bit(tmp_path, parts):
    save(make(tmp_path, parts), parts, 10, 20, 30)
    found = make(tmp_path, parts).newest(NOTE)
    assert found.step == 30 and found.note["history"] == {"offset": 30}
    expected = {**parts, "step": parts["step"] + 30, "w": parts["w"] * 30}
    for name, x in expected.items():
        assert np.asarray(found.parts[name]).tobytes() == np.asarray(x).tobytes(), name
        assert found.parts[name].sharding == x.sharding and found.parts[name].dtype == x.dtype


def place_of(folder, step):
    for place in steps_in_memory.STEMS:
        path = folder / f"{place}.json"
        if path.exists() and json.loads(path.read_text())["step"] == step:
            return place
    raise AssertionError("the step is not there")


@pytest.mark.parametrize(("is_sound", "expected"), [(True, None), (False, 30)])
def test_a_sound_checkpoint_that_is_newer_is_preferred(
    monkeypatch, tmp_path, parts, is_sound, expected
):
    manager = object.__new__(checkpoint_manager.CheckpointManager)
    save(make(tmp_path, parts), parts, 20, 30)
    manager._memory = make(tmp_path, parts)
    manager._abstract = None
    manager._note = lambda: NOTE
    manager._checkpointer = types.SimpleNamespace(has_newer=lambda step: is_sound and step == 30)
    monkeypatch.setattr(checkpoint_manager, "of_saved_parts", lambda abstract, parts: parts)
    monkeypatch.setattr(checkpoint_manager, "History", lambda **fields: fields)
    restored = manager.in_memory()
    assert (restored and restored.step) == expected


def test_a_step_that_is_damaged_or_half_written_is_not_taken(tmp_path, parts, caplog):
    save(make(tmp_path, parts), parts, 10, 20)
    with (tmp_path / f"{place_of(tmp_path, 20)}.bin").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    assert make(tmp_path, parts).newest(NOTE).step == 10
    assert "step 20 in memory fails its checksum" in caplog.text
    (tmp_path / f"{place_of(tmp_path, 10)}.json").unlink()  # as while it is written
    assert make(tmp_path, parts).newest(NOTE) is None


def test_after_a_restart_the_restored_step_stays_until_the_next_is_whole(tmp_path, parts):
    save(make(tmp_path, parts), parts, 10, 20)
    again = make(tmp_path, parts)
    assert again.newest(NOTE).step == 20
    save(again, parts, 21)
    assert {place_of(tmp_path, 20), place_of(tmp_path, 21)} == {"0", "1"}


@pytest.mark.parametrize("steps", [(10,), (10, 20)])
def test_the_copy_that_a_lost_process_was_restored_from_stays(tmp_path, parts, steps, monkeypatch):
    """Process 1 has lost its memory, and process 0 has the copy in place 0, or in place 1."""
    partner = make(tmp_path / "partner-0", parts)
    save(partner, parts, *steps)
    place = place_of(partner.folder, steps[-1])
    headers = steps_in_memory._headers(partner.folder, "run", {})
    has = steps_in_memory._keys(headers)
    [header] = [each for each in headers.values() if each["step"] == steps[-1]]
    content = np.fromfile(partner.folder / f"{place}.bin", np.uint8)

    made = make(tmp_path / "lost-1", parts)
    with monkeypatch.context() as patch:
        patch.setattr(
            cluster, "gather_texts", lambda text: [json.dumps({"parts": "p", "has": has}), text]
        )
        patch.setattr(cluster, "gather", lambda value: [max(value, int(place)), value])
        patch.setattr(made, "_receive", lambda source, header_here: (header, content))
        assert made.newest(NOTE).step == steps[-1]
    sent = []
    made._partner = partners.Address("10.78.0.1", 1)
    monkeypatch.setattr(partners, "send", lambda to, secret, stem, *rest: sent.append(stem))
    save(made, parts, 30)
    assert place_of(made.folder, 30) == steps_in_memory._other(place)
    assert sent == [f"copy-1-{steps_in_memory._other(place)}"]


@pytest.mark.parametrize(
    ("lost", "places"), [({20}, "01101"), ({20, 30}, "01101"), ({10, 20, 30, 40, 50}, "00101")]
)
def test_a_copy_that_does_not_arrive_leaves_the_one_before_for_one_step(
    tmp_path, parts, lost, places, monkeypatch, caplog
):
    made = make(tmp_path / "of-run-1", parts)
    made._partner = partners.Address("10.78.0.1", 1)

    def send(to, secret, stem, header, content):
        if header["step"] in lost:
            raise ConnectionError("a cable is out")

    monkeypatch.setattr(partners, "send", send)
    taken = []
    for step in (10, 20, 30, 40, 50):
        made.save(step, parts, NOTE)
        made._writing.result()
        taken.append(place_of(made.folder, step))
    made.close()
    assert "".join(taken) == places
    assert "the copy of step 20 did not arrive: a cable is out" in caplog.text


def test_a_step_with_records_that_wait_for_a_disk_is_not_resumed(tmp_path, parts):
    """The steps that a run makes on a full disk come again, until one with its record is whole."""
    made = make(tmp_path, parts)
    for step, recorded in ((10, True), (20, True), (30, False), (40, False)):
        made.save(step, parts, NOTE, recorded=recorded)
    made.close()
    again = make(tmp_path, parts)
    assert again.newest(NOTE).step == 20
    again.save(30, parts, NOTE, recorded=False)
    again.save(40, parts, NOTE)
    again.close()
    assert make(tmp_path, parts).newest(NOTE).step == 40
    assert {place_of(tmp_path, 20), place_of(tmp_path, 40)} == {"0", "1"}


def test_a_step_of_another_run_or_config_is_not_taken(tmp_path, parts):
    save(make(tmp_path, parts), parts, 10)
    assert make(tmp_path, parts, run="other").newest(NOTE) is None
    assert make(tmp_path, parts).newest({**NOTE, "config": "other"}) is None


def on_mesh(parts, *sizes):
    """The same arrays on another mesh, whose places are along other dimensions."""
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = Mesh(np.array(devices).reshape(sizes), ("data", "model"))
    axes = {"w": ("model", "data"), "half": (None, "model")}
    layouts = {name: NamedSharding(mesh, PartitionSpec(*axes.get(name, ()))) for name in parts}
    return {name: jax.device_put(x, layouts[name]) for name, x in parts.items()}


@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (4, 1)])
def test_a_step_of_another_mesh_is_put_together_bit_for_bit(tmp_path, parts, sizes):
    save(make(tmp_path, parts), parts, 10, 20)
    other = on_mesh(parts, *sizes)
    made = make(tmp_path, other)
    found = made.newest(NOTE)
    assert found.step == 20 and found.note["history"] == {"offset": 20}
    expected = {**parts, "step": parts["step"] + 20, "w": parts["w"] * 20}
    for name, x in expected.items():
        assert np.asarray(found.parts[name]).tobytes() == np.asarray(x).tobytes(), name
        assert found.parts[name].sharding == other[name].sharding
    save(made, found.parts, 30)
    assert {place_of(tmp_path, 20), place_of(tmp_path, 30)} == {"0", "1"}, "20 stayed"


def of_process(bounds):
    """The parts of a process that holds some rows of a matrix, and a number."""
    start, stop = bounds
    size = (stop - start) * 24
    return [
        Part("w", ((start, stop), (0, 3)), (stop - start, 3), "float64", 0, size),
        Part("n", (), (), "int32", -(-size // 64) * 64, 4),
    ]


def test_parts_of_four_processes_become_those_of_two_and_missing_ones_are_noticed():
    matrix = np.arange(24.0).reshape(8, 3)
    filling = parts_lib.Filling(of_process((2, 6)))
    for start in (0, 2, 4, 6):
        assert filling.is_whole == (start > 4)
        theirs = of_process((start, start + 2))
        data = np.zeros(68, np.uint8)
        theirs[0].view(data)[:] = matrix[start : start + 2]
        theirs[1].view(data)[...] = 7
        filling.take(data, theirs)
    rows, number = of_process((2, 6))
    assert (rows.view(filling.content) == matrix[2:6]).all() and number.view(filling.content) == 7


def test_too_little_shared_memory_says_how_much_is_needed(small_disk, parts):
    parts = {"w": jax.device_put(jnp.zeros(50_000), parts["step"].sharding)}
    disk = small_disk(300)
    with pytest.raises(
        steps_in_memory.SharedMemoryError, match=r"needs 400,000 bytes .* are left in"
    ):
        make(disk, parts)


def test_too_little_shared_memory_for_the_copies_of_others_ends_the_start(
    small_disk, parts, monkeypatch
):
    disk = small_disk(300)
    made = make(disk, parts)
    other = json.dumps(["other parts", "10.78.0.2", ["copy-3-0", "copy-3-1"], 200_000])
    monkeypatch.setattr(cluster, "gather_texts", lambda text: [text, other])
    with pytest.raises(
        steps_in_memory.SharedMemoryError, match=r"needs 400,000 bytes .* for copy-3-0, copy-3-1"
    ):
        made.find_partner("127.0.0.1:1", "a secret of the job")


def test_a_folder_of_somebody_else_is_refused_and_those_left_behind_are_removed(tmp_path):
    folder = steps_in_memory.folder_of("a" * 32, 0, tmp_path)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert steps_in_memory.folder_of("a" * 32, 0, tmp_path) == folder
    holder = json.loads((folder / steps_in_memory.HOLDER).read_text())
    (folder / steps_in_memory.HOLDER).write_text(json.dumps(holder | {"pid": 2**22 - 1}))
    steps_in_memory.folder_of("b" * 32, 1, tmp_path)
    assert folder.exists(), "it waits for its supervisor's successor"
    os.utime(folder / steps_in_memory.HOLDER, (1, 1))
    second = steps_in_memory.folder_of("b" * 32, 0, tmp_path)
    assert second.exists() and not folder.exists()
    second.chmod(0o755)
    with pytest.raises(steps_in_memory.SharedMemoryError, match="not a folder of this user alone"):
        steps_in_memory.folder_of("b" * 32, 0, tmp_path)


def test_an_unsupervised_run_keeps_nothing_in_memory(folder):
    output = run(folder, "toy.py", "--config.checkpoint.memory_every=2", code=2)
    assert "this run has none; add --supervise" in output


MEMORY = ("--config.checkpoint.memory_every=1", "--config.checkpoint.every=100000")


def killed(folder, started, victim):
    """Kill a process of a run that has made steps. Return the last step."""
    reaches(folder, 6, started)
    first = pid_of_run(folder, victim)
    os.kill(first, signal.SIGKILL)
    return first


def memory_of(supervisor):
    """The folders in shared memory of a supervisor."""
    folders = []
    for holder in steps_in_memory.PARENT.glob(f"jaxtrain-*/{steps_in_memory.HOLDER}"):
        if json.loads(holder.read_text())["pid"] == supervisor.pid:
            folders.append(holder.parent)
    return folders


def goes_on(folder, started, victim, first):
    """Wait until the run is further than before, and end it. Return the outputs."""
    step = step_of(folder / "runs" / "toy")
    wait_for(lambda: pid_of_run(folder, victim) != first, watch=started)
    reaches(folder, step + 3, started)
    started[0].send_signal(signal.SIGTERM)
    outputs = outputs_of(started)
    assert {process.returncode for process in started} == {75}, outputs
    assert step - 1 <= starts(folder)[-1].first <= step + 1, outputs
    steps = list(records(folder / "runs" / "toy", "train"))
    assert steps == list(range(1, len(steps) + 1))
    assert not [process.pid for process in started if memory_of(process)], "it is free again"
    return outputs


@pytest.mark.slow
def test_a_restart_resumes_from_memory(folder, ending):
    started = [supervised(folder, *ENDLESS, *MEMORY)]
    ending += started
    first = killed(folder, started, 0)
    goes_on(folder, started, 0, first)
    assert ids(folder)  # the same rows, if a batch was read twice


def test_a_process_without_its_memory_gets_its_parts_from_another_one(folder, ending):
    """As one on a host that took the place of a lost one. The layout replicates the parameters."""
    started = several(folder, *ENDLESS, *MEMORY)
    ending += started
    first = killed(folder, started, 1)
    [place] = memory_of(started[1])
    for path in place.glob("[01].*"):
        path.unlink()
    goes_on(folder, started, 1, first)
    assert ids(folder, "ids0.jsonl") and ids(folder, "ids1.jsonl")


def receiver(folder, run="run", secret=b"a secret of the job"):
    return partners.Receiver(folder, run, secret, "127.0.0.1")


def send(
    to,
    run="run",
    secret=b"a secret of the job",
    content=b"parts" * 1_000_000,
    sha256="",
    stem="copy-3-1",
):
    digest = sha256 or hashlib.sha256(content).hexdigest()
    header = {"run": run, "step": 3, "parts": "p", "bytes": len(content), "sha256": digest}
    partners.send(to.address, secret, stem, header, memoryview(content))


def test_a_partner_takes_a_copy_of_its_own_run_alone(tmp_path):
    with contextlib.closing(receiver(tmp_path)) as to:
        send(to)
        assert (tmp_path / "copy-3-1.bin").read_bytes() == b"parts" * 1_000_000
        assert json.loads((tmp_path / "copy-3-1.json").read_text())["step"] == 3
        with pytest.raises(ConnectionError, match="it is of the run other, and this one is run"):
            send(to, run="other")
        with pytest.raises(ConnectionError):
            send(to, secret=b"another secret of 16")
        assert (tmp_path / "copy-3-1.json").exists(), "a refused one changes nothing"
        with pytest.raises(ConnectionError, match="it fails its checksum"):
            send(to, sha256="0" * 64)
        assert not (tmp_path / "copy-3-1.json").exists()


def test_a_fast_sender_lets_others_have_their_turn(tmp_path, monkeypatch):
    """The data of the first one are there whenever the receiver asks for them."""
    monkeypatch.setattr(partners, "CHUNK", 20_000)
    arrived = []
    with contextlib.closing(receiver(tmp_path)) as to:
        read = to._loop.sock_recv_into

        async def read_slowly(connection, buffer):
            time.sleep(0.005)  # the sender is faster
            return await read(connection, buffer)

        monkeypatch.setattr(to._loop, "sock_recv_into", read_slowly)

        def send_as(name, content):
            send(to, content=content, stem=f"copy-{name}-0")
            arrived.append(name)

        first = threading.Thread(target=send_as, args=(1, b"parts" * 1_000_000))
        first.start()
        wait_for(lambda: (tmp_path / "copy-1-0.bin").exists())
        send_as(2, b"small")
        first.join()
    assert arrived == [2, 1]


def test_other_threads_run_while_a_large_place_is_mapped(tmp_path, parts, monkeypatch):
    """Python 3.11 holds its lock in mmap, and in madvise."""
    made = make(tmp_path, parts)
    size = 5 << 20
    made._allocate({"0": size})
    monkeypatch.setattr(steps_in_memory, "PIECE", 1 << 20)
    flags, pieces = [], []

    class Place(mmap.mmap):
        def __new__(cls, *arguments, **named):
            flags.append(named["flags"])
            return super().__new__(cls, *arguments, **named)

        def madvise(self, advice, start, length):
            pieces.append(length)
            return super().madvise(advice, start, length)

    monkeypatch.setattr(steps_in_memory.mmap, "mmap", Place)
    for writable in (True, False):
        with made._mapped("0", size, writable=writable) as content:
            assert content.size == size
    assert flags == [mmap.MAP_SHARED] * 2 and pieces == [1 << 20] * 10


def test_a_partner_without_room_says_how_much_it_needs(small_disk):
    with contextlib.closing(receiver(small_disk(300))) as to:
        with pytest.raises(ConnectionError, match="5,000,000 bytes of shared memory are needed"):
            send(to)
        send(to, content=b"small enough")


def test_parts_of_different_steps_or_attempts_are_no_step():
    """A partner may have a copy of the step before."""
    whole = steps_in_memory._whole(["a", "b"])
    first = [[8, 0, "a", whole], [7, 0, "a", whole]]
    for copies in ([[7, 0, "b", whole]], [[8, 1, "b", whole], [7, 0, "b", whole]]):
        assert steps_in_memory._sources((8, 0), [first, copies]) == {}
        assert steps_in_memory._sources((7, 0), [first, copies]) == {"a": 0, "b": 1}
    of_another_mesh = [[8, 0, "b", steps_in_memory._whole(["b", "c"])]]
    assert steps_in_memory._sources((8, 0), [first, of_another_mesh]) == {}


def test_partners_are_on_other_hosts_and_only_if_the_layout_has_no_replica_there():
    hosts = ["a", "a", "b", "b"]
    assert partners.choose(["0", "1", "2", "3"], hosts) == [2, 2, 0, 0]
    assert partners.choose(["0", "1", "0", "1"], hosts) == [-1, -1, -1, -1]
    assert partners.choose(["0", "1", "2", "3"], ["a"] * 4) == [-1] * 4


@pytest.fixture
def resolved(monkeypatch):
    """Let the name node007 lead to an address."""

    def lead_to(address):
        real = socket.getaddrinfo

        def resolve(host, *arguments, **named):
            return real(address if host == "node007" else host, *arguments, **named)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)

    return lead_to


# Debian gives a machine's own name to 127.0.1.1. The last one is a name with AAAA records alone.
@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", "::1"])
def test_a_coordinator_by_name_is_one_host_and_other_hosts_reach_it(
    tmp_path, parts, address, resolved, monkeypatch
):
    resolved(address)
    made = make(tmp_path, parts)
    hosts = []

    def gather(text):
        report = json.loads(text)
        if report:
            hosts.append(report[1])
        return [text, text]

    monkeypatch.setattr(cluster, "gather_texts", gather)
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        made.find_partner("node007:1", "a secret of the job")
    assert hosts == ["node007"] * 2
    with contextlib.closing(partners.Receiver(tmp_path, "run", b"a secret", hosts[0])) as to:
        assert to.address.host == "node007"
        other = partners.Address("127.0.0.1", to.address.port)  # any other of the machine
        send(types.SimpleNamespace(address=other), secret=b"a secret")


def test_the_address_on_the_way_to_a_coordinator_is_a_processs_own(resolved, monkeypatch):
    """The address of a service leads to process 0, and is no machine's."""
    resolved("192.0.2.1")
    addresses_of = {"192.0.2.1": "10.78.0.5"}

    class Probe(socket.socket):
        def connect(self, to):
            self.own = addresses_of[to[0]]

        def getsockname(self):
            return self.own, 5

    monkeypatch.setattr(socket, "socket", Probe)
    assert partners.own_host("node007:27508") == "10.78.0.5"


@pytest.mark.slow
def test_a_lost_host_gets_its_parts_from_its_partner(folder, ending):
    """Two hosts in network namespaces; each has half of the parameters."""
    hosts = soak.Hosts()
    if not hosts.real:
        pytest.skip("only root may make network namespaces")
    port = free_port()

    def start(process):
        environment = at(port, process) | {"JAXTRAIN_COORDINATOR": hosts.coordinator(port)}
        environment |= {"JAXTRAIN_SECRET": "5e" * 16, "IDS": str(folder / f"ids{process}.jsonl")}
        overrides = (*ENDLESS, *MEMORY, "--config.mesh.fsdp=2", "--config.mesh.data=1")
        inside = hosts.inside(process)
        overrides += ("--config.train.eval_every=0",)
        return command(folder, "toy.py", "--supervise", *overrides, inside=inside, **environment)

    with contextlib.closing(hosts):
        started = [start(0), start(1)]
        ending += started
        reaches(folder, 6, started)
        first = pid_of_run(folder, 1)
        [place] = [p for p in steps_in_memory.PARENT.glob("jaxtrain-*-1") if is_of(p, folder)]
        os.kill(first, signal.SIGKILL)
        started[1].kill()
        started[1].communicate()
        shutil.rmtree(place)
        started[1] = start(1)
        ending.append(started[1])
        outputs = goes_on(folder, started, 1, first)
        assert "process 1 takes copies of steps in memory" in outputs[0]


def is_of(place, folder):
    """Whether shared memory is of the run in a folder, whose supervisor has it as its own."""
    pid = json.loads((place / steps_in_memory.HOLDER).read_text())["pid"]
    return os.path.realpath(f"/proc/{pid}/cwd") == str(folder)


# Process I of N finds the newest step in memory, compares its parts, and keeps the next step.
OF_SEVERAL = """
import pathlib, sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtrain.supervise import steps_in_memory

folder, (processes, process, port) = sys.argv[1], map(int, sys.argv[2:])
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
mesh = Mesh(np.array(jax.devices()), ("fsdp",))

def put(x, *axes):
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

tree = {
    "rows": put(np.arange(64.0, dtype="f4").reshape(8, 8), "fsdp"),
    "columns": put(np.arange(32, dtype="i4").reshape(4, 8), None, "fsdp"),
    "step": put(np.int32(7)),
}
abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
)
place = pathlib.Path(folder, f"of-run-{process}")
place.mkdir(exist_ok=True)
memory = steps_in_memory.Memory(str(place), "run", abstract, processes)
found = memory.newest({})
for name, x in tree.items() if found else ():
    for ours, theirs in zip(found.parts[name].addressable_shards, x.addressable_shards):
        assert ours.index == theirs.index
        assert np.asarray(ours.data).tobytes() == np.asarray(theirs.data).tobytes(), name
step = found.step if found else 0
print("found", step, flush=True)
memory.reserve()
memory.save(step + 1, tree, {})
memory.close()
"""


@pytest.mark.slow
def test_a_step_goes_to_other_numbers_of_processes_if_all_its_parts_are_there(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(OF_SEVERAL)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    # Of the step of four processes, two do not have all parts: they go back to their own.
    for processes, step in ((1, 0), (2, 1), (4, 2), (2, 2)):
        port = free_port()
        started = []
        for process in range(processes):
            numbers = [str(n) for n in (processes, process, port)]
            arguments = [sys.executable, str(program), str(tmp_path), *numbers]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(arguments, env=environment, **pipes))
        for output in outputs_of(started):
            assert f"found {step}\n" in output, output
