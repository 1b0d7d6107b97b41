"""What the operator asked of the API server, compared with what its Role lets it ask."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

#: Discovery, which every account may read.
_DISCOVERY = re.compile(r"^/(api|apis|version)(/[^/?]+){0,2}/?(\?.*)?$")


#: An API server that starts serves before it has read the Roles: it refuses what it grants a moment later.
WARM_UP_SECONDS = 10.0


class Right(NamedTuple):
    group: str
    resource: str  # with its subresource, as in a Role
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


def check_audit(
    audit_log: Path,
    account: str,
    rules: Iterable[Mapping[str, Any]],
    *,
    whole: bool = True,
    beside: Iterable[Mapping[str, Any]] = (),
) -> list[str]:
    """Problems, each said once: refusals, requests outside `rules`, and, when `whole`, rights that were not used.

    `beside` are rules of further Roles, which need not be used.
    `account` is a user, or a ServiceAccount's name, which then counts in every namespace.
    """
    granted, known = set(rights(rules)), {*rights(rules), *rights(beside)}
    used: set[Right] = set()
    problems: set[str] = set()
    refused: dict[tuple[str, Right], float] = {}
    for event in events(audit_log, account):
        asked = _asked(event)
        where = event.get("requestURI", "")
        code = (event.get("responseStatus") or {}).get("code", 0)
        if asked is None:
            if event.get("objectRef") or not _DISCOVERY.match(where):
                problems.add(f"not of a namespace: {event['verb']} {where}")
            continue
        if asked not in known:
            problems.add(f"outside the Role: {asked}")
        who = event["user"]["username"], asked
        if code == 403 and _decision(event) != "allow":  # an admission plugin says 403, too
            refused.setdefault(who, _time(event))
            continue
        if who in refused and _time(event) - refused[who] <= WARM_UP_SECONDS:
            del refused[who]
        used.add(asked)
        if asked.verb == "patch" and code == 201:  # an apply that made the object also needs this right
            used.add(asked._replace(verb="create"))
    problems |= {f"refused: {asked} ({user})" for user, asked in refused}
    if whole:
        problems |= {f"never used: {right}" for right in granted - used}
    return sorted(problems)


def rights(rules: Iterable[Mapping[str, Any]]) -> Iterator[Right]:
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield Right(group, resource, verb)


def events(audit_log: Path, account: str) -> Iterator[dict[str, Any]]:
    """Answered requests of the account, oldest first; a watch counts from its start."""
    wanted = account if account.startswith("system:") else f":{account}"
    for line in _lines(audit_log):
        if wanted not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:  # cut off by the end of an API server, or not yet whole
            continue
        if event["user"]["username"].endswith(wanted) and event["stage"] != "RequestReceived":
            yield event


def _lines(audit_log: Path) -> Iterator[str]:
    """Also what the API server has put aside: at 100 MB it adds the date to the file's name and begins another."""
    for file in sorted(audit_log.parent.glob(f"{audit_log.stem}*{audit_log.suffix}")):
        with file.open() as lines:
            yield from lines


def _asked(event: Mapping[str, Any]) -> Right | None:
    """None for what is no object of a namespace."""
    ref = event.get("objectRef") or {}
    if not ref.get("resource") or not ref.get("namespace"):
        return None
    below = f"/{ref['subresource']}" if ref.get("subresource") else ""
    return Right(ref.get("apiGroup", ""), f"{ref['resource']}{below}", event["verb"])


def _time(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()


def _decision(event: Mapping[str, Any]) -> str:
    return str((event.get("annotations") or {}).get("authorization.k8s.io/decision", ""))


class WholeRun(pytest.Item):
    """The last item of every run on a cluster: all that the operators asked, by the audit log.

    That nothing was refused and nothing lies outside the Role must hold for any selection of tests. That every
    right is used can be judged only where all of them ran; `left_out` says what did not.
    """

    left_out = ""
    audit_log: Path
    account: str
    rules: Sequence[Mapping[str, Any]]
    beside: Sequence[Mapping[str, Any]] = ()

    def runtest(self) -> None:
        problems = check_audit(self.audit_log, self.account, self.rules, whole=not self.left_out, beside=self.beside)
        if problems:
            raise Overstepped(problems)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Overstepped):
            return f"the audit log of {self.account}:\n  " + "\n  ".join(excinfo.value.args[0])
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class Overstepped(Exception):
    """The operator asked for what it may not, or may what it never asks for."""


def missing_from(folder: Path, chosen: Iterable[Path], deselected: Iterable[str], arguments: Iterable[str]) -> str:
    """What a run leaves out of the tests that lie in `folder`; "" when it is all of them.

    `deselected` are tests that options left out; those that run apart (slow) are not counted.
    """
    single = [argument for argument in arguments if "::" in argument]
    files = {file.name for file in folder.glob("test_*.py")} - {path.name for path in chosen if path.parent == folder}
    return ", ".join([*sorted(files), *deselected]) or (f"all but {', '.join(single)}" if single else "")
