"""The first hour of a newcomer, in a bare Debian: each command of README.md as it stands there, and its time.

    sudo python benchmarks/first_hour.py ROOT [--pip-conf FILE] [--bind FOLDER ...] [--json FILE]

ROOT is a folder for the system: it is made by debootstrap (Debian's minimum, without Python and compiler) where it does
not exist yet. The commands run in it under chroot, in a mount namespace, as a new user with an empty home, and nothing
in the environment but HOME and PATH; network, kernel and processor are this machine's. Of the checkout only what is
committed is there. Needs root, Linux and port 8000; this script itself needs Python alone. --pip-conf and --bind (a
folder that is there in the root too, read only) are for machines whose packages come from elsewhere than PyPI.

Behind README come wrong usages of tests/test_wrong_usages.py, each a process of its own that has to print the sentence
which helps. Prints a line for each command: seconds, whether it did what README says, and what was put in place of what
only the reader has, such as the path of a model. Not run: scripts/test, which takes as long as the tests do.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
MIRROR, SUITE = "http://deb.debian.org/debian", "bookworm"
USER, HOME = "newcomer", "/home/newcomer"
ADDRESS = "http://127.0.0.1:8000"
LIMIT_S = 1800
WRONG_USAGES = 12  # of those that need no file
# $1: the root, $2: the user, $3: folders to show, $4: the home, $5: the command
ENTER = """
mount -t proc proc "$1/proc"; mount --rbind /sys "$1/sys"; mount --rbind /dev "$1/dev"
mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
for folder in $3; do
    mkdir -p "$1$folder"; mount --bind "$folder" "$1$folder"; mount -o remount,bind,ro "$1$folder"
done
exec chroot --userspec="$2:$2" "$1" env -i HOME="$4" PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin \
    bash -c 'cd; [ ! -d diptych ] || cd diptych; eval "$0"' "$5"
"""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PACKAGES = re.compile(r"`sudo (apt install [^`]+)`")
GGUF = re.compile(r"models/\S+\.gguf")


@dataclass
class Step:
    """A command and what came of it. outcome: "ok", or what was wrong. instead: what was changed to run it here."""

    command: str
    seconds: float
    outcome: str
    instead: str = ""


class Root:
    """A system of its own in a folder."""

    def __init__(self, folder: Path, binds: list[str]) -> None:
        self.folder = folder.resolve()
        self._binds = " ".join(binds)

    def start(self, command: str, user: str = USER, errors: int = subprocess.STDOUT) -> "subprocess.Popen[str]":
        """Begin a shell command in the checkout, in a process group of its own. errors: where standard error goes."""
        home = HOME if user == USER else "/root"
        words = ("unshare", "--mount", "--propagation", "private", "sh", "-ec", ENTER)
        return subprocess.Popen(
            [*words, "sh", str(self.folder), user, self._binds, home, command],
            text=True, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip

    def run(self, command: str, user: str = USER, given: str = "") -> tuple[int, str, float]:
        """Exit status, output and seconds of a command. given: its standard input."""
        begin = time.monotonic()
        process = self.start(command, user)
        try:
            printed, _ = process.communicate(given, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
        return process.returncode, printed, time.monotonic() - begin

    def make(self, pip_conf: Path | None) -> None:
        """The system, its user and the checkout."""
        if not (self.folder / "etc").is_dir():
            tool = shutil.which("debootstrap")
            if tool is None:
                sys.exit("debootstrap is not installed (on Debian or Ubuntu: sudo apt install debootstrap)")
            words = (tool, "--variant=minbase", "--include=ca-certificates", SUITE, str(self.folder), MIRROR)
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        shutil.copy("/etc/resolv.conf", self.folder / "etc/resolv.conf")
        (self.folder / "etc/hosts").write_text("127.0.0.1 localhost\n")  # written by Debian's installer
        if pip_conf is not None:
            shutil.copy(pip_conf, self.folder / "etc/pip.conf")
        status, printed, _ = self.run(f"userdel -r {USER}; useradd -m {USER} && mkdir {HOME}/diptych", "root")
        if status:
            sys.exit(f"no user can be made in {self.folder}: {printed}")
        target = self.folder / HOME[1:] / "diptych"
        packed = subprocess.run(("git", "archive", "HEAD"), cwd=CHECKOUT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(("tar", "xf", "-", "-C", str(target)), input=packed, check=True)
        self.run(f"chown -R {USER}:{USER} {HOME}", "root")


class Server:
    """A server that README starts. printed: what it says until it is ready."""

    def __init__(self, root: Root, command: str) -> None:
        begin = time.monotonic()
        self._process = root.start(command)
        self.printed, self.is_ready = "", False
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.printed += line
            if line.startswith("curl "):
                self.is_ready = True
            elif self.is_ready and not line.strip():  # behind the request to paste
                break
        self.seconds = time.monotonic() - begin
        self.error = "" if self.is_ready else self.printed.strip()[-300:]

    @property
    def request(self) -> str:
        """The request that it prints to paste."""
        return self.printed[self.printed.index("curl ") :].strip()

    def stop(self) -> int:
        """Ctrl-C, and the exit status."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        return self._process.returncode


@contextmanager
def serving(root: Root, command: str) -> Iterator[Server]:
    """A server, until the end of the block."""
    server = Server(root, command)
    try:
        yield server
    finally:
        server.stop()


def first_text_s(root: Root, command: str, line: str) -> tuple[float, str]:
    """Seconds until ``diptych chat`` shows the first text of its answer to a line, and the whole answer."""
    begin = time.monotonic()
    process = root.start(command, errors=subprocess.DEVNULL)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.close()
    first = process.stdout.read(1)
    seconds = time.monotonic() - begin
    answer = first + process.stdout.read()
    process.wait(LIMIT_S)
    process.stdout.close()
    return seconds, answer


class Trial:
    """README from top to bottom."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.text = (CHECKOUT / "README.md").read_text()
        self.steps: list[Step] = []
        self.figures: dict[str, float] = {}
        self.model = GGUF.findall(self.text)[0]

    def run(self) -> None:
        """All of it, in the order of the page."""
        packages = PACKAGES.findall(self.text)[0]
        self.step(packages, f"apt-get update && DEBIAN_FRONTEND=noninteractive {packages} -y", user="root")
        self.root.run("DEBIAN_FRONTEND=noninteractive apt install -y curl", "root")  # to paste requests; not in README
        own = ""
        for language, block in BLOCK.findall(self.text):
            if language == "python":
                self.python(block)
            for line in block.replace("\\\n", " ").splitlines() if language == "sh" else ():
                command = line.partition("#")[0].strip()
                if command.startswith(("python3 -m venv", "pip install")):
                    own += f" && {command}" if own else command
                    if command.startswith("pip"):
                        self.step(command, own, instead="behind the line above, in one shell")
                elif command:
                    self.command(command)
        self.wrong_usages()

    def command(self, command: str) -> None:
        """One line of a block."""
        if command == "scripts/serve":
            self.first_server()
        elif command.startswith("scripts/serve "):
            self.conversation(command)
        elif command in ("scripts/diptych chat", "scripts/test") or command.startswith("export "):
            return  # with the server above it, or not at all; where packages come from is --pip-conf's business
        elif command.startswith(("diptych serve", "diptych front")):
            self.server(command)
        elif command.startswith(("diptych diagnose", "diptych advise")):
            self.diagnosis(command)
        else:
            mkdir = "mkdir -p monitoring && " if "monitoring/" in command else ""
            self.write_own_hardware()
            self.step(command, f"{mkdir}{in_environment(command)}", instead="after mkdir monitoring" if mkdir else "")

    def step(self, command: str, run: str, user: str = USER, instead: str = "") -> None:
        """A command that ends by itself."""
        status, printed, seconds = self.root.run(run, user)
        self.note(command, seconds, "ok" if status == 0 else f"status {status}: {printed.strip()[-300:]}", instead)

    def note(self, command: str, seconds: float, outcome: str, instead: str = "") -> None:
        """Print and keep a step."""
        self.steps.append(Step(command, round(seconds, 1), outcome, instead))
        print(f"{seconds:7.1f} s  {command[:100]}  {outcome}" + (f"  [{instead}]" if instead else ""), flush=True)

    def first_server(self) -> None:
        """scripts/serve in a fresh checkout, the request and the chat that it prints, and a second start."""
        begin = time.monotonic()
        with serving(self.root, "scripts/serve") as server:
            self.note("scripts/serve", server.seconds, server.error or "ok")
            if not server.is_ready:
                return
            status, printed, seconds = self.root.run(server.request.replace("curl ", "curl -sS ", 1))
            answer = json.loads(printed)["choices"][0]["text"] if status == 0 else printed
            self.note("the request that it prints", seconds, "ok" if status == 0 and answer.strip() else printed)
            print(f"           {answer!r}")
            chat = next(line for line in server.printed.splitlines() if " chat " in line)
            seconds, answer = first_text_s(self.root, chat, "import os")
            self.note(chat, seconds, "ok" if answer.strip() else "no answer")
            self.figures["s from scripts/serve to a streamed answer"] = round(time.monotonic() - begin, 1)
        with serving(self.root, "scripts/serve") as server:
            self.note("scripts/serve, a second time", server.seconds, server.error or "ok")
            self.figures["s of the second start"] = round(server.seconds, 1)

    def conversation(self, command: str) -> None:
        """A real model, and two turns with it."""
        with serving(self.root, command) as server:
            self.note(command, server.seconds, server.error or "ok")
            if server.is_ready:
                line = "What is the capital of France?\nAnd of Italy?"
                seconds, answer = first_text_s(self.root, "scripts/diptych chat", line)
                self.note("scripts/diptych chat", seconds, "ok" if "Paris" in answer else "no Paris")
                print(f"           {answer[:200]!r}")

    def server(self, command: str) -> None:
        """A server with options, or a front over engines: one of our own stands for them."""
        run = re.sub(r"/path/to/[\w.-]+", self.model, command)
        instead = "" if run == command else f"with {self.model}"
        engine: AbstractContextManager[object] = nullcontext()
        if command.startswith("diptych front"):
            run = "diptych front --engine openai=http://127.0.0.1:8001"
            instead, engine = run, serving(self.root, in_environment("diptych serve --port 8001"))
        with engine, serving(self.root, in_environment(run)) as server:
            outcome = server.error or "ok"
            if "--cores-per-worker" in command and "core" in outcome:  # more than this machine has
                outcome = f"ok: refused, {outcome.splitlines()[-1]}"
            self.note(command, server.seconds, outcome, instead)

    def diagnosis(self, command: str) -> None:
        """A question about a running server, which has answered some requests."""
        with serving(self.root, in_environment("diptych serve --prefill 1 --decode 1")) as server:
            for _ in range(12 * server.is_ready):
                self.root.run(server.request)
            self.step(command, in_environment(command))

    def python(self, block: str) -> None:
        """A program that talks to a server, or has the model in its own process."""
        client = "127.0.0.1:8000" in block
        run = re.sub(r"/path/to/[\w.-]+", self.model, block).replace("Qwen2.5-0.5B-Instruct", Path(self.model).stem)
        begin = f"cat > /tmp/trial.py <<'END'\n{run}END\n" + in_environment("python /tmp/trial.py")
        first = block.strip().splitlines()[0]
        if not client:
            self.step(first, begin, instead=f"with {self.model}")
            return
        with serving(self.root, in_environment(f"diptych serve {self.model}")):
            self.root.run(in_environment("pip install openai"))
            self.step(first, begin, instead=f"with {self.model}, after pip install openai")

    def wrong_usages(self) -> None:
        """What people type wrong: how long they wait for the sentence that helps."""
        source = ast.parse((CHECKOUT / "tests/test_wrong_usages.py").read_text())
        [table] = [node.value for node in source.body if isinstance(node, ast.AnnAssign) and node.value is not None]
        wrong = {words: helpful for words, helpful in ast.literal_eval(table).items() if "{}/" not in words}
        longest_s = 0.0
        for words in list(wrong)[:: len(wrong) // WRONG_USAGES][:WRONG_USAGES]:
            status, printed, seconds = self.root.run(in_environment(f"diptych {words}"))
            is_helped = status in (1, 2) and wrong[words] in printed
            self.note(f"diptych {words}", seconds, "ok" if is_helped else f"status {status}: {printed.strip()[-300:]}")
            longest_s = max(longest_s, seconds)
        self.figures["s of the slowest answer to a wrong usage"] = round(longest_s, 2)

    def write_own_hardware(self) -> None:
        """The file of the reader's own hardware, from the page that describes it."""
        page = (CHECKOUT / "docs/simulation.md").read_text()
        [own] = [block for language, block in BLOCK.findall(page) if language == "toml" and "[my-box]" in block]
        (self.root.folder / HOME[1:] / "diptych/my-box.toml").write_text(own)


def in_environment(command: str) -> str:
    """A command of the environment that README makes for its reader."""
    return f". ~/diptych-venv/bin/activate 2>/dev/null || . .venv/bin/activate; {command}"


def main() -> None:
    """Make the root, go through README, print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--pip-conf", type=Path)
    parser.add_argument("--bind", action="append", default=[], metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if os.geteuid():
        sys.exit("chroot needs root: sudo python benchmarks/first_hour.py ...")
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8000)) == 0:
            sys.exit("port 8000 is taken; README's commands need it")
    root = Root(arguments.root, arguments.bind)
    root.make(arguments.pip_conf)
    trial = Trial(root)
    trial.run()
    for name, value in trial.figures.items():
        print(f"{value:7.1f} {name}")
    if arguments.json is not None:
        commit = subprocess.run(("git", "rev-parse", "HEAD"), cwd=CHECKOUT, check=True, capture_output=True, text=True)
        found = {"commit": commit.stdout.strip(), "figures": trial.figures, "steps": list(map(asdict, trial.steps))}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any(not step.outcome.startswith("ok") for step in trial.steps))


if __name__ == "__main__":
    main()
