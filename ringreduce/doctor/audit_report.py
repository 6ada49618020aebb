"""What an audit record says, for people: whether it is whole, its runs, and the commands that make one again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, name_ranks
from ringreduce.common.keys import Secret
from ringreduce.common.settings import rows
from ringreduce.observe.audit_chain import Examination, is_signed

T = TypeVar("T")

_HASH_LENGTH = 64
#: Events by which a program names its configuration and its data.
_NAMED = ("configuration", "data")
#: A package and its version, which pip can take for nothing else: not for an option, an address or a file.
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_-]*", re.ASCII)
#: Settings that change no number of a training.
_OF_THIS_RUN = {"audit", "dump", "log_level", "otlp", "report", "status", "timeline", "tuning"}


def verdict(found: Examination, known: str | None, key: Secret | None = None) -> tuple[bool, list[str]]:
    """Return whether a record is whole, and lines that say so, or which line is wrong, and what cannot be known.

    Args:
        found: what it holds.
        known: the hash of a line that is to be there; None: none is known.
        key: has to have signed each line; and the last run has to have an end. None: signatures are not looked at.

    Raises:
        ConfigError: ``known`` is no hash.
    """
    if known is not None and not re.fullmatch(f"[0-9a-f]{{{_HASH_LENGTH}}}", known):
        raise ConfigError(f"a hash has {_HASH_LENGTH} characters, 0 to 9 and a to f, got {known!r}")
    if found.wrong is not None:
        return False, [f"line {found.wrong} is wrong: {found.reason}"]
    wrong = [] if key is None else list(_unsigned(found, key))
    place = next((line["line"] for line in found.lines if line["hash"] == known), None)
    if known is not None and place is None:
        wrong.append(f"no line has the hash {known}: lines were removed at the end, or the chain was made anew")
    worlds = dict.fromkeys(line["world"] for line in found.lines if line["event"] == "begin")
    ended = {line["world"] for line in found.lines if line["event"] == "end"}
    endless = [each for each in worlds if each not in ended]
    if key is not None and found.lines and found.lines[-1]["world"] in endless:
        wrong.append("the last run has no end")
    said = [f"whole: {len(found.lines)} lines, of {len(worlds)} run{'s' * (len(worlds) != 1)}"]
    said += [f"line {each} was cut off: the process that wrote it was killed" for each in found.cut]
    said += [
        f"run {_shown(each)} has no end: it goes on, it was killed, or lines were removed at the end"
        for each in endless
    ]
    if place is not None:
        said.append(f"line {place} has the hash {known}: all lines up to there are as they were when that was noted")
    elif known is None and found.lines:
        said += _not_known(found, key)
    return not wrong, wrong + said


def _unsigned(found: Examination, key: Secret) -> Iterator[str]:
    """Yield what is wrong with the signatures."""
    numbers = [line["line"] for line in found.lines if not is_signed(line, key)]
    if numbers:
        more = f" (and {len(numbers) - 1} more)" if len(numbers) > 1 else ""
        why = "who wrote it did not have that key, or the chain was made anew"
        yield f"line {numbers[0]} is not signed by the key {key.fingerprint}{more}: {why}"
    if not found.lines:
        yield f"no line is signed by the key {key.fingerprint}"


def _not_known(found: Examination, key: Secret | None) -> Iterator[str]:
    """Yield what a record does not say, and what helps."""
    keep = f"Keep the last hash elsewhere, and look for it later: --has {found.lines[-1]['hash']}"
    if key is not None:
        yield f"signed: each line, by the key {key.fingerprint}"
        yield f"not known: whether runs were removed at the end as a whole. {keep}"
        return
    why = "without the key (--key FILE)" if any("signature" in line for line in found.lines) else "as nothing is signed"
    yield f"not known, {why}: whether lines were removed at the end, or all hashes were made anew. {keep}"


def show(found: Examination) -> None:
    """Print the runs of a record."""
    console = Console(highlight=False)
    for world in dict.fromkeys(line["world"] for line in found.lines):
        lines = [line for line in found.lines if line["world"] == world]
        console.print(Text(f"run {_shown(world)}, {_shown(lines[0]['time'][:19])}", style="bold"), soft_wrap=True)
        rows = [row for line in lines for row in _rows(line)]
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            bad = name.partition(" ")[2] in ("refused", "failed")
            console.print(Text(f"  {name:<{width}}  {text}", style="red" if bad else ""), soft_wrap=True)
    for each in found.cut:
        console.print(Text(f"line {each} was cut off: the process that wrote it was killed", style="red"))


def _rows(line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is shown of a line: a name, and a text."""
    facts = line["facts"]
    if line["event"] != "begin":
        who = "" if line["ranks"] == [0] else f"{_ranks(line['ranks'])}: "
        text = ", ".join(f"{_shown(name)}={_shown(value)}" for name, value in facts.items())
        text = "well" if line["event"] == "end" and facts.get("error", "") is None else text
        yield f"{_shown(line['time'][11:19])} {_shown(line['event'])}", f"{who}{text}"
        return
    hosts = _part(facts, "hosts", kind=dict)
    placed = (f"{_shown(host)} ({_ranks(_part(hosts, host, kind=list))})" for host in hosts)
    script = _part(facts, "script", kind=dict)
    repository = _part(facts, "repository", kind=dict)
    packages = _part(facts, "packages", kind=dict)
    versions = _part(facts, "versions", kind=dict)
    yield "command", shlex.join(map(_shown, _part(facts, "command", kind=list)))
    yield "ranks", f"{_shown(facts.get('size'))} on {', '.join(placed)}"
    if facts.get("restart"):
        yield "restart", _shown(facts["restart"])
    if facts.get("allocation"):
        yield "allocation", _pairs(_part(facts, "allocation", kind=dict))
    if script:
        yield "script", f"{_shown(script.get('path'))}, sha256 {_shown(script.get('sha256'))}"
    if "unknown" in repository:
        yield "repository", f"unknown: {_shown(repository['unknown'])}"
    else:
        where = f"{_shown(repository.get('path'))}, commit {_shown(repository.get('commit'))}"
        yield "repository", f"{where}, {'clean' if repository.get('clean') else 'changed'}"
    if repository.get("difference"):
        yield "difference", f"sha256 {_shown(repository['difference'])}"
    if repository.get("untracked"):
        yield "untracked", _shown(repository["untracked"])
    yield "versions", _pairs(versions)
    yield "packages", f"{len(_part(packages, 'versions', kind=dict))}, sha256 {_shown(packages.get('sha256'))}"
    yield "settings", " ".join(_variables(_part(facts, "settings", kind=dict))) or "as they come"


def commands(found: Examination, world: str) -> list[str]:
    """Return the lines of a shell program that makes a run again.

    Args:
        found: what the record holds.
        world: how the token of the run begins; empty: the last one.

    Raises:
        ConfigError: there is no such run.
    """
    begins = [line for line in found.lines if line["event"] == "begin" and line["world"].startswith(world)]
    if not begins:
        which = f"whose token begins with {world!r}" if world else "at all"
        raise ConfigError(f"the record has no run {which}")
    begin = begins[-1]
    facts = begin["facts"]
    said = [line for line in found.lines if line["world"] == begin["world"] and line["event"] != "begin"]
    made = [f"# run {_shown(begin['world'])} of {_shown(begin['time'])}", *_checkout(facts), *_environment(facts)]
    made += filter(None, [_start(facts)])  # a record that was made by hand may name no command
    made += [f"# {each['event']}: {_pairs(each['facts'])}" for each in said if each["event"] in _NAMED]
    lacks = list(_lacks(facts))
    if not any("seed" in name.lower() for each in said if each["event"] == _NAMED[0] for name in each["facts"]):
        lacks.append("the seed: the program has not named it, as by rr.audit('configuration', seed=...)")
    if facts.get("restart") or begin is not found.lines[0]:
        lacks.append("the state that the run began with, if it went on from the commits of an earlier one")
    return [*made, *(f"# cannot be had: {each}" for each in lacks)]


def _checkout(facts: Mapping[str, Any]) -> Iterator[str]:
    repository = _part(facts, "repository", kind=dict)
    script = _part(facts, "script", kind=dict)
    if _has_commit(repository):
        url = repository.get("url") or repository.get("path")
        yield f"git clone -- {_word(url)} again && cd again"
        yield f"git checkout {repository['commit']}"
    if script:
        path = _shown(script.get("path")).removeprefix(f"{_part(repository, 'path', kind=str)}/")
        line = f"{_shown(script.get('sha256'))}  {path}"
        yield f"echo {_word(line)} | sha256sum --check"
    inside = f"{_part(facts, 'folder', kind=str)}/".partition(f"{_part(repository, 'path', kind=str)}/")[2]
    if _has_commit(repository) and inside:
        yield f"cd -- {_word(inside)}"


def _environment(facts: Mapping[str, Any]) -> Iterator[str]:
    packages = _part(facts, "packages", kind=dict)
    python = _shown(_part(facts, "versions", kind=dict).get("Python"))
    numbers = re.match(r"[0-9]+\.[0-9]+", python, re.ASCII)
    yield f"python{numbers[0] if numbers else 3} -m venv venv && . venv/bin/activate  # it was Python {python}"
    elsewhere = _part(packages, "elsewhere", kind=list)
    versions = _part(packages, "versions", kind=dict).items()
    listed = [f"{name}=={version}" for name, version in versions if name not in elsewhere]
    if listed := list(map(_word, filter(_REQUIREMENT.fullmatch, listed))):
        yield f"pip install {' '.join(listed)}"


def _start(facts: Mapping[str, Any]) -> str:
    """Return the command that starts the program, with its settings; nothing if it names no program."""
    words = [_shown(each) for each in _part(facts, "command", kind=list)]
    if not words or words[0].startswith("-"):  # or it would be an option of `ringreduce run`
        return ""
    if re.fullmatch("python[0-9.]*", words[0].rpartition("/")[2]):
        words[0] = "python"  # of the new environment
    if facts.get("size") != 1:
        hosts = _part(facts, "hosts", kind=dict)
        counts = ",".join(f"{_shown(name)}:{len(_part(hosts, name, kind=list))}" for name in hosts)
        words = ["ringreduce", "run", "-np", _shown(facts.get("size")), *(["-H", counts] * (len(hosts) > 1)), *words]
    settings = _part(facts, "settings", kind=dict)
    report = ["RINGREDUCE_REPORT=again.json"] * bool(settings.get("report"))  # to be compared with the first one
    return " ".join([*_variables(settings), *report, *map(shlex.quote, words)])


def _lacks(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a record does not hold of the program."""
    repository = _part(facts, "repository", kind=dict)
    packages = _part(facts, "packages", kind=dict)
    if not _has_commit(repository):
        yield f"the program's version: {_shown(repository.get('unknown', 'the record does not say it'))}"
    if repository.get("difference"):
        digest = _shown(repository["difference"])
        yield f"changes that were not committed; git diff --binary HEAD | sha256sum said {digest}"
    if untracked := _part(repository, "untracked", kind=list):
        yield f"files that git does not have: {', '.join(map(_shown, untracked))}"
    if elsewhere := _part(packages, "elsewhere", kind=list):
        yield f"packages that came from a folder or a repository: {', '.join(map(_shown, elsewhere))}"
    others = [
        f"{_shown(name)} {_shown(version)}"
        for name, version in _part(packages, "versions", kind=dict).items()
        if not _REQUIREMENT.fullmatch(f"{name}=={version}")
    ]
    if others:
        yield f"packages with names or versions that pip does not have: {', '.join(others)}"
    yield "the MPI library, drivers and the machine, unless packages bring them; secrets in the environment"


def _has_commit(repository: Mapping[str, Any]) -> bool:
    """Return whether a commit is named, by what git cannot take for an option."""
    return re.fullmatch("[0-9a-f]{7,64}", str(repository.get("commit"))) is not None


def _variables(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that are not as they come, as variables of the environment."""
    standard = Config()
    changed = []
    for name, _, row in rows(Config):
        usual = getattr(standard, name)
        usual = usual.value if isinstance(usual, Enum) else usual
        value = settings.get(name, usual)
        if name not in _OF_THIS_RUN and value != usual:
            text = str(int(value)) if isinstance(value, bool) else "0" if value is None else _shown(value)
            changed.append(f"{row.variable}={_word(text)}")
    return changed


def _part(facts: Any, name: str, kind: type[T]) -> T:
    """Return an entry, or an empty one: who can write a record can make lines that say anything."""
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, kind) else kind()


def _pairs(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{_shown(name)} {_shown(value)}" for name, value in facts.items())


def _ranks(ranks: list[Any]) -> str:
    return name_ranks(sorted(each for each in ranks if type(each) is int))


def _shown(value: Any) -> str:
    """Return a value of JSON in one line; what terminals would act on is escaped."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _word(value: Any) -> str:
    return shlex.quote(_shown(value))
