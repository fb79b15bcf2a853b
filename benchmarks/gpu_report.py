"""What `gpu.py` keeps: results, written after each one; failures, which are results; time left."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Report = dict[str, Any]


class Budget:
    """Seconds that may be used; nothing begins when they are over, what runs goes on to its end."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter):
        self._seconds, self._clock, self._begin = seconds, clock, clock()

    @property
    def used(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._begin

    @property
    def left(self) -> float:
        """Seconds until it is over, 0 from then on."""
        return max(0.0, self._seconds - self.used)


class Journal:
    """Entries by section and name, in a file that is whole at any time.

    Attributes:
      budget: of all jobs.
      skipped: what there was no time for.
    """

    def __init__(self, facts: Report, budget: Budget, output: Path | None):
        """Begins with `facts`; without an output nothing is written."""
        self.budget, self._output = budget, output
        self.skipped: list[str] = []
        self._facts = facts
        self._sections: dict[str, dict[str, Report]] = {}

    def note(self, name: str, value: Any) -> None:
        """Adds a fact."""
        self._facts[name] = value
        self._write()

    def attempt(
        self, section: str, step: str, name: str, job: Callable[[], Report]
    ) -> Report | None:
        """Runs a job and adds what it returns to the entry of this section and name.

        A job that raises makes the entry wrong, with the problem. One that raises TimeoutError when
        the time is over has waited for a program in vain, and is skipped like one that never began.

        Returns:
          the entry; None if the job was skipped.
        """
        if not self.budget.left:
            self._skip(step, name)
            return None
        self._write(running=f"{step} {name}")  # should it never end, or end the process
        try:
            found = job()
        except Exception as error:
            if isinstance(error, TimeoutError) and not self.budget.left:
                self._skip(step, name)
                return None
            found = {"right": False, "problem": problem_of(error)}
        entries = self._sections.setdefault(section, {})
        entries[name] = {"name": name, **entries.get(name, {}), **found}
        self._write()
        return entries[name]

    def failed(self, name: str) -> bool:
        """Returns whether a job of that name raised."""
        return any("problem" in entries.get(name, {}) for entries in self._sections.values())

    def wrong(self) -> list[str]:
        """Returns the names of entries that are not right."""
        every = [entry for entries in self._sections.values() for entry in entries.values()]
        return [entry["name"] for entry in every if not entry["right"]]

    def _skip(self, step: str, name: str) -> None:
        self.skipped.append(f"{step} {name}")
        self._write()

    def _write(self, **more: Any) -> None:
        if self._output is None:
            return
        sections = {section: [*entries.values()] for section, entries in self._sections.items()}
        seconds = round(self.budget.used, 1)
        report = {**self._facts, **sections, "skipped": self.skipped, "seconds": seconds, **more}
        fresh = self._output.with_name(self._output.name + ".new")
        fresh.write_text(json.dumps(report, indent=1) + "\n")
        fresh.replace(self._output)


def problem_of(error: BaseException) -> str:
    """Returns an error's kind and first line."""
    first, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {first}"[:300]
