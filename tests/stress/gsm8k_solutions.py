"""Grades the solutions of the models of the GSM8K paper and compares each reward with the judgement of the authors.

    python tests/stress/gsm8k_solutions.py PATH

PATH is `grade_school_math/data/example_model_solutions.jsonl` of github.com/openai/grade-school-math: 1,319 problems
with four solutions each, marked as correct or incorrect. The file is not part of this repository. Exit status 0: all
agree.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tunix_like.rewards.math import grade

MARK = "A:"
"""In that file the final answer follows the last of these marks, in place of the `####` of GSM8K."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    agreed, differing = 0, []
    for line in parser.parse_args().path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        gold = row["ground_truth"].rpartition(MARK)[2].strip()
        for name in ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"):
            thought, mark, answer = row[name]["solution"].rpartition(MARK)
            completion = f"{thought}#### {answer.strip()}" if mark else answer
            rewards = [grade(completion, gold), grade(completion, gold, lenient=True)]
            if rewards == [float(row[name]["is_correct"])] * 2:
                agreed += 1
            else:
                differing.append(f"gold {gold!r}, answer {answer.strip()!r:.80}: rewards {rewards}")
    print(*differing, sep="\n", end="\n" * bool(differing))
    print(f"{agreed} of {agreed + len(differing)} solutions graded as the authors did, by gsm8k and by gsm8k_lenient")
    return int(bool(differing) or not agreed)


if __name__ == "__main__":
    raise SystemExit(main())
