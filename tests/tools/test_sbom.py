"""The list of the parts that come with a wheel: its crates, and the packages of Python."""

import json
import zipfile

import pytest

from tools import sbom

NAME = "jaxtrain-1-cp311-abi3-manylinux_2_28_aarch64"
JAX = {
    "metadata": {
        "name": "JAX_lib",
        "version": "1.2",
        "license": "BSD\nand a long text",
        "classifier": ["Topic :: Software"],
    },
    "download_info": {"archive_info": {"hashes": {"sha256": "ab" * 32}}},
}


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / f"{NAME}.whl"
    crate = {
        "type": "library",
        "name": "symphonia",
        "version": "0.6.1",
        "purl": "pkg:cargo/symphonia@0.6.1",
    }
    with zipfile.ZipFile(path, "w") as archive:
        listed = {"bomFormat": "CycloneDX", "specVersion": "1.5", "components": [crate]}
        archive.writestr("jaxtrain-1.dist-info/sboms/crates.cyclonedx.json", json.dumps(listed))
    return path


def test_the_list_beside_a_wheel_has_crates_and_packages(wheel, monkeypatch, capsys):
    monkeypatch.setattr(sbom, "packages", lambda processor: [JAX] if processor == "aarch64" else [])
    assert sbom.main([str(wheel)]) == 0
    listed = json.loads((wheel.parent / f"{NAME}.cdx.json").read_text())
    crate, package = listed["components"]
    assert (listed["bomFormat"], crate["name"]) == ("CycloneDX", "symphonia")
    assert (package["name"], package["version"], package["purl"]) == (
        "jax-lib",
        "1.2",
        "pkg:pypi/jax-lib@1.2",
    )
    assert package["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    assert package["licenses"] == [{"license": {"name": "BSD"}}]
    assert "1 crates, 1 Python packages" in capsys.readouterr().out


def test_a_licence_is_read_where_a_package_states_it():
    classifiers = [
        "License :: OSI Approved :: MIT License",
        "License :: OSI Approved :: BSD License",
    ]
    assert sbom.licence({"license_expression": "MIT", "classifier": classifiers}) == "MIT"
    assert (
        sbom.licence({"classifier": classifiers, "license": "see LICENSE"})
        == "MIT License AND BSD License"
    )
    assert sbom.licence({}) == ""


def test_a_wheel_without_a_list_of_crates_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("a/__init__.py", "")
    with pytest.raises(ValueError, match="a.whl holds 0 lists of crates; expected 1"):
        sbom.crates(tmp_path / "a.whl")
