"""What gpu-check says of a part on the terminal."""

from __future__ import annotations

from typing import Any


def plan_line(found: dict[str, Any]) -> str:
    """What the planner expects beside what was measured (`planned.compared`)."""
    if found["reason"]:
        return f"plan: no expected figures: {found['reason']}"
    pairs = (
        f"{name} {one['planned']:.3g} planned, {one['measured']:.3g} measured"
        for name, one in found["figures"].items()
        if one["measured"] is not None
    )
    return f"plan for {found['gpu']}: {'; '.join(pairs)}"


def said(part: str, result: dict[str, Any]) -> str:
    """A part's outcome in a few lines for the terminal."""
    lines = [f"{part}: {'passed' if result['passed'] else 'FAILED'}, exit code {result['exit code']}"]
    if "tests" in result:
        lines[0] += (
            f", on {result['device']} {result['tests']} tests, {result['failures']} failed, "
            f"{result['errors']} in error, {result['skipped']} skipped"
        )
    lines += [f"skipped: {reason}" for reason in result.get("skipped because", [])]
    for case in result.get("cases", []):
        for name, figures in case["contenders"].items():
            took = figures.get("skipped") or (
                f"{1000 * figures['seconds']['median']:.2f} ms, {figures['peak bytes'] / 1e9:.2f} GB"
            )
            floor = f", {figures['of floor']:.2f} of the GEMMs" if "of floor" in figures else ""
            lines.append(f"head {case['case']}, {name}: {took}{floor}")
    for name, ran in result.get("layouts", {}).items():
        if last := ran.get("headline"):
            mfu = "unknown" if last["update MFU"] is None else f"{last['update MFU']:.3f}"
            lines.append(
                f"{name} on {ran['ranks']} ranks, step {last['step']}: {last['seconds']:.2f} s (update "
                f"{last['update seconds']:.2f} s, MFU {mfu}), gradient norm {last['gradient norm']:.4g}"
            )
        if plan := ran.get("plan"):
            lines.append(f"{name}, {plan_line(plan)}")
    if plan := result.get("plan"):
        lines.append(plan_line(plan))
    lines += result.get("wrong", [])
    if "headline" in result and "way" in result:
        last = result["headline"]
        lines.append(
            f"{part}, step {last['step']}: {last['seconds']:.2f} s (generate {last['generate seconds']:.2f} s, push "
            f"{last['push seconds']:.2f} s), {last['tokens a second and GPU']:.0f} tokens a second and GPU, gap "
            f"{last['gap']:.1e}"
        )
    elif "headline" in result:
        last = result["headline"]
        mfu, memory = last["update MFU"], last["peak GPU bytes"]
        lines.append(
            f"training, step {last['step']}: {last['seconds']:.2f} s (update {last['update seconds']:.2f} s, "
            f"MFU {'unknown' if mfu is None else format(mfu, '.3f')}), peak memory "
            f"{'unknown' if memory is None else format(memory / 1e9, '.1f') + ' GB'}, "
            f"planned {result['planned peak GPU bytes'] / 1e9:.1f} GB"
        )
    return "\n".join([*lines, *result.get("log", [])])
