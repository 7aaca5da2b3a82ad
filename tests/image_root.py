"""The root file system that deploy/Containerfile describes, and a server in it:

    unshare --mount --net --pid --fork --kill-child python image_root.py DIRECTORY

as root, in a network namespace without a network. Each instruction is carried out, with two things put in place of what
only a registry has. The base image is this machine's system and Python, read only. The packages that pip would download
are those of this Python's environment: exactly what the project's own metadata asks for is shown to the image, under
the image's pip, which must find that nothing is missing. Prints what was seen as JSON.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parents[1]
OWN = "diptych"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # links, or folders to show
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/login.defs", "/etc/default/useradd")
DEVICES = ("null", "zero", "full", "random", "urandom")
PACKAGES = "/packages"  # where the image finds those of this environment
BUILD_TOOLS = ("setuptools", "wheel")  # pip's isolated build would download these
READY_S = 120.0


@dataclass
class Stage:
    """One FROM, as far as it is built."""

    root: Path
    directory: str = "/"
    user: str = "0:0"
    environment: dict[str, str] = field(default_factory=dict)
    command: dict[str, list[str]] = field(default_factory=dict)  # ENTRYPOINT, CMD


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Containerfile: each word in capitals, and the rest of its line."""
    joined = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        yield word, rest.strip()


def requirements(project: str, extra: str) -> list[str]:
    """The requirements of a project with an extra: this one's as it stands in the checkout, another's as installed."""
    if project != OWN:
        return list(metadata.requires(project) or ())
    own = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    return [*own["dependencies"], *own["optional-dependencies"].get(extra, ())]


def needed(extra: str) -> set[str]:
    """The distributions that this environment has for this project with an extra, itself left out."""
    found: set[str] = set()
    waiting = [(OWN, extra)]
    seen = set(waiting)
    while waiting:
        name, wanted = waiting.pop()
        for text in requirements(name, wanted):
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": wanted}):
                continue
            own = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if own != OWN:
                found.add(own)
            for each in {(own, name) for name in ("", *requirement.extras)} - seen:
                seen.add(each)
                waiting.append(each)
    return found


def show(source: str, target: Path) -> None:
    """Bind a file or a folder, read only."""
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    run("mount", "--bind", source, str(target))
    run("mount", "-o", "remount,bind,ro", str(target))


def run(*command: str) -> None:
    """Raises CalledProcessError, with what the command says."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()


def base(root: Path) -> Stage:
    """What stands for a Debian with a Python."""
    for name in SYSTEM:
        if os.path.islink(name):
            (root / name[1:]).symlink_to(os.readlink(name))
        elif os.path.isdir(name):
            show(name, root / name[1:])
    for name in filter(os.path.exists, SETTINGS):
        show(name, root / name[1:])
    for name in ("tmp", "proc", "dev", "var/tmp", "opt"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    show(sys.base_prefix, root / sys.base_prefix[1:])
    show(str(packages()), root / PACKAGES[1:])
    run("mount", "-t", "proc", "proc", str(root / "proc"))
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root / "dev"))
    for name in DEVICES:
        (root / "dev" / name).touch()
        run("mount", "--bind", f"/dev/{name}", str(root / "dev" / name))
    for name in ("dev/shm", "tmp"):
        (root / name).mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(root / name))
    path = f"{sys.base_prefix}/bin:/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
    return Stage(root, environment={"PATH": path})


def packages() -> Path:
    """The packages of this environment."""
    return Path(metadata.distribution("torch").locate_file(""))


def link_packages(site: Path) -> None:
    """Show the image's environment what its project needs, and nothing else of this one."""
    for name in sorted(needed("engine").union(BUILD_TOOLS)):
        try:
            files = metadata.distribution(name).files or ()
        except metadata.PackageNotFoundError:
            continue  # pip will say so
        for old in site.glob(f"{name}-*.dist-info"):  # venv brings tools of its own
            shutil.rmtree(old)
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if (site / top).is_dir() and not (site / top).is_symlink():
                shutil.rmtree(site / top)
            if not os.path.lexists(site / top):
                (site / top).symlink_to(f"{PACKAGES}/{top}")


def in_root(stage: Stage, words: list[str], **more: str) -> list[str]:
    """A command in the stage's root, as its user."""
    variables = [f"{name}={value}" for name, value in (stage.environment | more).items()]
    enter = ["sh", "-ec", f'cd {shlex.quote(stage.directory)}; exec "$@"', "sh"]
    return ["chroot", f"--userspec={stage.user}", str(stage.root), "/usr/bin/env", "-i", *variables, *enter, *words]


def run_line(stage: Stage, line: str) -> None:
    """A RUN, one command after the other."""
    for command in line.split(" && "):
        if command.startswith("apt-get") or "/var/lib/apt" in command:
            continue  # the base has it
        run(*in_root(stage, ["sh", "-ec", command], PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0", HOME="/tmp"))
        if created := re.fullmatch(r"python -m venv (\S+)", command):
            [site] = (stage.root / created[1][1:]).glob("lib/python3*/site-packages")
            link_packages(site)


def copy(stage: Stage, rest: str, stages: dict[str, Stage]) -> None:
    """A COPY: of the checkout what git knows, or of another stage."""
    *options, source, target = rest.split()
    into = stage.root / (Path(stage.directory) / target).as_posix().lstrip("/")
    if options:
        origin = stages[options[0].removeprefix("--from=")].root
        into.parent.mkdir(parents=True, exist_ok=True)
        run("cp", "-a", f"{origin}/{source.lstrip('/')}", str(into))
        return
    assert source == ".", rest
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, check=True, stdout=subprocess.PIPE).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (CHECKOUT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, into / name)


def build(text: str, directory: Path) -> Stage:
    """The last stage of a Containerfile."""
    stages: dict[str, Stage] = {}
    stage = Stage(directory)
    for word, rest in instructions(text):
        match word:
            case "FROM":
                _, _, name = rest.partition(" AS ")
                root = directory / (name or "image")
                root.mkdir()
                stage = stages[name] = base(root)
            case "RUN":
                run_line(stage, rest)
            case "COPY":
                copy(stage, rest, stages)
            case "WORKDIR":
                stage.directory = rest
                (stage.root / rest[1:]).mkdir(parents=True, exist_ok=True)
            case "ENV":
                for pair in shlex.split(rest):
                    name, _, value = pair.partition("=")
                    stage.environment[name] = value.replace("$PATH", stage.environment["PATH"])
            case "USER":
                stage.user = rest
            case "ENTRYPOINT" | "CMD":
                stage.command[word] = json.loads(rest)
            case "EXPOSE" | "ARG":
                pass
            case _:
                raise ValueError(f"no meaning here: {word} {rest}")
    return stage


def ask() -> dict[str, Any]:
    """A completion."""
    body = {"prompt": "def read(path):\n    with", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    request = Request(
        "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=60) as reply:
        return dict(json.load(reply))


def is_ready() -> bool:
    """Whether the server answers so."""
    try:
        with urlopen("http://127.0.0.1:8000/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def serve(stage: Stage, log: Path) -> dict[str, Any]:
    """What a server in it does, and where it comes from."""
    run("mount", "--rbind", str(stage.root), str(stage.root))  # what is mounted there stays as it is
    run("mount", "-o", "remount,bind,ro", str(stage.root))
    words = stage.command["ENTRYPOINT"] + stage.command["CMD"]
    with log.open("wb") as out:
        server = subprocess.Popen(in_root(stage, words), stdout=out, stderr=subprocess.STDOUT)
    try:
        until_s = time.monotonic() + READY_S
        while not is_ready():
            assert server.poll() is None and time.monotonic() < until_s, "the server did not become ready"
            time.sleep(0.1)
        status = Path(f"/proc/{server.pid}/status")
        users = next(line.split()[1:] for line in status.read_text().splitlines() if line.startswith("Uid:"))
        seen = {"answer": ask(), "users": sorted(set(users)), "interfaces": [name for _, name in socket.if_nameindex()]}
        seen["is_read_only"] = bool(os.statvfs(stage.root).f_flag & os.ST_RDONLY)
    finally:
        server.terminate()
        server.wait(30)
    return seen | {"status": server.returncode}


def main() -> None:
    """Build it and try it."""
    directory = Path(sys.argv[1])
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "proc", "proc", "/proc")  # of this namespace of processes
    run("ip", "link", "set", "lo", "up")
    stage = build((CHECKOUT / "deploy/Containerfile").read_text(), directory)
    [site] = (stage.root / "opt/diptych").glob("lib/python3*/site-packages")
    kernels = sorted(path.name for path in site.glob("diptych/runtime/attention/kernels/*.so"))
    print(json.dumps(serve(stage, directory / "server.log") | {"kernels": kernels}))


if __name__ == "__main__":
    main()
