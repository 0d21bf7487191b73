"""Why a table is compressed, or is not, in sentences."""

from __future__ import annotations

from flexshard import units
from flexshard.planner.compression.decision import CompressionPlan, TableChoice, TableOption

__all__ = ["explain_table"]


def explain_table(decision: CompressionPlan, name: str) -> str:
    """See :meth:`CompressionPlan.explain`."""
    table = decision.table(name)
    chosen = table.option
    lines = [
        f"{name}: {table.rows:,} rows x {table.dim}, {chosen.name}.",
        f"  {_words(chosen)} per rank and iteration"
        + (f", {chosen.shape.compression:.0f} times fewer numbers than the table." if chosen.shape else "."),
    ]
    price = decision.memory_price_seconds_per_gib
    if price:
        lines.append(f"The budget binds: memory is worth {units.format_seconds(price)} per GiB at the margin.")
    elif any(
        option.sharding or _is_beyond(decision, one, option)
        for one in decision.tables.values()
        for option in one.options
    ):
        lines.append("At the margin more memory saves nothing.")
    else:
        lines.append("The budget does not bind: the least time wins.")
    for index, option in enumerate(table.options):
        if index == table.chosen:
            continue
        more = option.priced_seconds - chosen.priced_seconds
        same = abs(more) <= 1e-6 * chosen.priced_seconds
        verdict = f"{units.format_seconds(abs(more))} {'more' if more >= 0 else 'less'} in all"
        verdict = "the same in all" if same else verdict
        reason = _reason(decision, table, option, more)
        lines.append(f"  As {option.name} it would need {_words(option)}: {verdict}{reason}.")
    if len(table.options) == 1:
        only = "No tensor train was offered for it" if chosen.shape is None else "Constraints leave it no other way"
        lines.append(f"  {only}.")
    return "\n".join(lines)


def _reason(decision: CompressionPlan, table: TableChoice, option: TableOption, more: float) -> str:
    """Why something that is faster, or cheaper at the price of memory, was not taken."""
    is_worse = more >= 0 and option.seconds >= table.option.seconds
    if _is_beyond(decision, table, option):
        return ", and beyond the budget" if is_worse else ", but beyond the budget"
    if is_worse:
        return ""
    loss = decision.loss - table.option.loss + option.loss
    if decision.loss_limit is not None and loss > decision.loss_limit:
        return f", but beyond the loss allowed ({loss:.4g} above {decision.loss_limit:.4g})"
    if more >= 0:
        return ""
    if any(one.sharding for one in table.options):  # whose figures are of an average rank
        return ", but it would make the busiest rank busier, not fit beside the others, or start further collectives"
    return ", but it would start calls that nothing else needs, or leave less to others, since tables are taken whole"


def _is_beyond(decision: CompressionPlan, table: TableChoice, option: TableOption) -> bool:
    """Whether this instead of what was taken, and nothing else, would not fit."""
    return decision.memory_bytes - table.option.memory_bytes + option.memory_bytes > decision.budget_bytes


def _words(option: TableOption) -> str:
    return (
        f"{units.format_bytes(option.memory_bytes)}, {units.format_seconds(option.compute_seconds)} of lookups and"
        f" {units.format_seconds(option.comm_seconds)} of communication"
    )
