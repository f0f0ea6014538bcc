"""The installed methods: what each declares, found by entry points, and what is wrong with a package that registers
one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from workbench.cli.job import method_help
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.methods import GROUP, attribute, declaration_of, registered
from workbench.methods import load_method
from workbench.methods.calls import CALLS
from workbench.schedules.published import build_published, published_schedules

LIMIT_S = 120
OURS = ("confidant", "fine_tuning", "galaxy_plus", "p_rge", "pac_plus", "ringada")


@pytest.mark.parametrize("method", OURS)
def test_a_declaration_holds_together(method: str) -> None:
    declared = declaration_of(method)
    assert load_method(method).name == method
    assert declared.defaults == {
        field.name: getattr(declared.options(), field.name) for field in fields(declared.options)
    }
    assert all(hasattr(Job(), name) or name in declared.defaults for name in declared.form)
    assert all(callable(attribute(name)) for name in declared.calls)
    assert all(CALLS.named(name).function is attribute(name) for name in declared.calls)


def test_declarations_load_nothing_heavy() -> None:
    script = (
        "import sys; from workbench.core.methods import declaration_of, registered; [declaration_of(name) for "
        "name in registered()]\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'scipy', 'ipywidgets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert done.stdout.strip() == "[]"


Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return what lays out an installed package 'other', as pip does, with a module of this text and this entry
    point."""

    def installed(text: str, point: str) -> None:
        (tmp_path / "other_method.py").write_text(text)
        about = tmp_path / "other-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[{GROUP}]\n{point}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        registered.cache_clear()

    yield installed
    monkeypatch.undo()
    registered.cache_clear()
    sys.modules.pop("other_method", None)


def test_a_method_of_another_package_adds_its_schedules_and_replaces_none(install: Install) -> None:
    text = """
from dataclasses import dataclass
from workbench.core.methods import Declaration
from workbench.schedules import backpropagation, gpipe_order
from workbench.schedules.published import Published, equal_pipeline
@dataclass
class Options: pass
build = lambda ranks=2: backpropagation(equal_pipeline(ranks), (1,), order=gpipe_order)
SCHEDULES = {"once": Published("another paper", build), "1f1b": Published("another paper", build)}
DECLARATION = Declaration(options=Options, implementation="", calls={}, schedules="other_method:SCHEDULES")
"""
    install(text, "scheduled = other_method:DECLARATION")
    assert build_published("once", {"ranks": 3}).world_size == 3
    assert published_schedules()["1f1b"].paper != "another paper"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import a_library_that_is_missing",
            "cannot be imported: ModuleNotFoundError: No module named 'a_library_that_is_missing'",
        ),
        ("", "AttributeError"),
        ("DECLARATION = {}", "is a dict"),
    ],
)
def test_a_broken_package_is_named_and_harms_no_other_method(text: str, said: str, install: Install) -> None:
    install(text, "other = other_method:DECLARATION")
    assert tuple(registered()) == (*OURS, "other")
    for use in (declaration_of, load_method):
        with pytest.raises(ConfigError, match=r"The method 'other' was asked for.*of the package other") as refused:
            use("other")
        assert said in str(refused.value)
    assert said in " ".join(method_help("other", "run"))
    assert "ring" in published_schedules()
    assert load_method("pac_plus").name == "pac_plus"


def test_a_declared_method_that_cannot_be_imported_is_refused(install: Install) -> None:
    text = "from dataclasses import replace; from workbench.core.methods import declaration_of\n"
    text += "DECLARATION = replace(declaration_of('ringada'), implementation='other_method:Missing')"
    install(text, "other = other_method:DECLARATION")
    assert declaration_of("other").implementation == "other_method:Missing"
    with pytest.raises(
        ConfigError, match=r"'other' was asked for. other_method:Missing cannot be imported: AttributeError.* Fix that"
    ):
        load_method("other")


def test_two_packages_cannot_take_one_name(install: Install) -> None:
    install("", "pac_plus = other_method:DECLARATION")
    with pytest.raises(
        ConfigError, match=r"'pac_plus' is both .* and other_method:DECLARATION of the package other.* rename"
    ):
        declaration_of("pac_plus")


def test_an_unknown_method_gets_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'pac_puls' was asked for. Known are confidant, .* mean 'pac_plus'"):
        load_method("pac_puls")
