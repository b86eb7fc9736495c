"""tools.pack_gpu_check: the contents of a folder, and that it installs from itself alone. pip's
resolver is not used here."""

import hashlib
import subprocess
import sys
import zipfile

import pytest

from tools import pack_gpu_check as tool


def wheel(folder, name, version="1.0", content="x = 1\n"):
    """A package of one module."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": content,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist:"
            " nowhere-to-be-found\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def test_a_folder_installs_from_itself_alone_and_runs_the_check(tmp_path):
    wheel(tmp_path / "pack" / "wheels", "packed_alone")
    size = tool.assemble(tmp_path / "pack", limit=64)
    assert (
        size
        == sum(file.stat().st_size for file in (tmp_path / "pack").rglob("*") if file.is_file())
        < 2**20
    )
    assert (tmp_path / "pack" / "requirements.txt").read_text() == "packed_alone==1.0\n"
    for _ in range(2):  # the second time nothing is installed
        done = subprocess.run(
            [tmp_path / "pack" / "run.sh", "--help"],
            env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and "--quick" in done.stdout, done.stderr
        assert (tmp_path / "pack" / "packages" / "packed_alone.py").read_text() == "x = 1\n"
        (tmp_path / "pack" / "wheels" / "packed_alone-1.0-py3-none-any.whl").unlink(missing_ok=True)
    for config in tool.ROOT.glob("configs/*.py"):
        copy = tmp_path / "pack" / "configs" / config.name
        assert (
            hashlib.sha256(copy.read_bytes()).digest()
            == hashlib.sha256(config.read_bytes()).digest()
        )
    assert {file.name for file in (tmp_path / "pack" / "tools" / "chip").iterdir()} >= {
        "cases.py",
        "correctness.py",
        "results_table.py",
    }


def test_packages_of_the_system_and_the_project_itself_are_left_out(tmp_path, monkeypatch):
    asked = []

    def resolve(wanted, python, *, deps=True):
        asked.append((tuple(wanted), python, deps))
        base = [("jax", "0.11.2"), ("PyYAML", "6.0")]
        if not deps:
            return [("tokenizers", "0.23")]
        return (
            [*base, ("pyarrow", "21.0.0"), ("jaxtrain", "0.1.0")]
            if any("whl" in one for one in wanted)
            else base
        )

    monkeypatch.setattr(tool, "resolve", resolve)
    own = tmp_path / "jaxtrain-0.1.0-cp311-abi3-linux_x86_64.whl"
    assert tool.missing(own, ["jax==0.11.*"], "3.12") == ["pyarrow==21.0.0", "tokenizers==0.23"]
    assert asked[1] == (("jax==0.11.*", str(own), *tool.SMALLER), "3.12", True)


def test_a_folder_that_is_too_large_is_an_error_that_names_the_largest(tmp_path):
    (tmp_path / "pack" / "wheels").mkdir(parents=True)
    (tmp_path / "pack" / "wheels" / "big-1.0-py3-none-any.whl").write_bytes(bytes(3 << 20))
    with pytest.raises(
        tool.PackError, match="--limit is 2; the largest files: wheels/big-1.0-py3-none-any.whl 3.0"
    ):
        tool.assemble(tmp_path / "pack", limit=2)


def test_errors_are_reported(tmp_path, capsys):
    assert (
        tool.main([f"--out={tmp_path}"]) == 2
        and "exists; name a new folder" in capsys.readouterr().err
    )
    missing = tmp_path / "no-such.whl"
    assert (
        tool.main([f"--out={tmp_path / 'pack'}", f"--wheel={missing}"]) == 2
        and str(missing) in capsys.readouterr().err
    )
