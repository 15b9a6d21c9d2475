"""`make fuzz ARGS="--ranks N --seeds FROM:TO"`: tries random compositions until stopped, or all of these seeds.

Prints a case that fails, cut down, with the command that repeats it; at the end counts, and the pairs of features that
were tried together.
"""

import argparse
import time
from collections import Counter
from itertools import combinations, count

from compositions import all_pairs, draw_case, with_graphs, with_mesh
from drawn_plans import is_narrow
from open_faults import why_left_out
from outcomes import cut_down, outcomes

_CHUNK = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", default="0:", help="FROM:TO; without TO, until stopped")
    parser.add_argument("--no-cut", action="store_true", help="print failing cases as they were drawn")
    parser.add_argument("--graphs", action="store_true", help="units run as graphs in all cases, not in some")
    parser.add_argument("--open", action="store_true", help="also cases that run into faults that are known and open")
    parser.add_argument("--mesh", default="", help="REPLICATExSHARD: the mesh of all plans, with strategies across it")
    asked = parser.parse_args()
    first, _, last = asked.seeds.partition(":")
    starts = range(int(first), int(last), _CHUNK) if last else count(int(first), _CHUNK)
    kinds: Counter[str] = Counter()
    replayed: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    possible = all_pairs()
    tried_pairs: set[tuple[str, str]] = set()
    num_left_out, began = 0, time.monotonic()
    try:
        for start in starts:
            stop = min(start + _CHUNK, int(last)) if last else start + _CHUNK
            cases = [draw_case(seed, num_ranks=asked.ranks) for seed in range(start, stop)]
            if asked.mesh:
                cases = [with_mesh(case, [int(size) for size in asked.mesh.split("x")]) for case in cases]
            if asked.graphs:
                cases = [case if case.graphs or is_narrow(dict(case.plan)) else with_graphs(case) for case in cases]
            tried = [case for case in cases if asked.open or not why_left_out(case)]
            num_left_out += len(cases) - len(tried)
            for case, found in outcomes(tried, num_ranks=asked.ranks):
                kinds[found.kind] += 1
                replayed += Counter(graphs=case.graphs, cases=found.replayed > 0, calls=found.replayed)
                tried_pairs.update(combinations(sorted(case.features()), 2))
                if found.kind == "refused":
                    refusals[found.line.rsplit("): ", 1)[-1][:110]] += 1
                if found.kind == "failed":
                    again = f"--ranks {asked.ranks} --seeds {case.seed}:{case.seed + 1}"
                    again += " --graphs" if asked.graphs else ""
                    again += f" --mesh {asked.mesh}" if asked.mesh else ""
                    print(f'FAILED, make fuzz ARGS="{again}": {found.line}', flush=True)
                    if not asked.no_cut:
                        case, found = cut_down(case, num_ranks=asked.ranks)
                        print(f"{case}\n  {found.line}\n", flush=True)
    except KeyboardInterrupt:
        pass
    seconds = time.monotonic() - began
    speed = sum(kinds.values()) / seconds
    missing = sorted(possible - tried_pairs)
    print(
        f"{dict(kinds)}, {num_left_out} left out, {replayed['calls']} replays in {replayed['cases']} of "
        f"{replayed['graphs']} cases with graphs, "
        f"in {seconds:.0f} s, {speed:.1f} cases per second; "
        f"{1 - len(missing) / len(possible):.1%} of {len(possible)} pairs of features tried"
    )
    if missing:
        print(f"not tried together, for example: {missing[:: max(1, len(missing) // 8)][:8]}")
    for line, number in refusals.most_common(20):
        print(f"{number:5d} {line}")
    return 1 if kinds["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
