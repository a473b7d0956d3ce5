"""How much of the state is used: traces of states as models read a text, and the filters in front of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from slimstate.records.folder import Found
from slimstate.records.states import FiltersRecord, TraceRecord
from slimstate.records.sweep import SweepRecord
from slimstate.report import plots
from slimstate.report.heat import common_scale, heat_map, legend
from slimstate.report.markup import Html, element, joined
from slimstate.report.numbers import brief, fixed, magnitude, plural
from slimstate.report.pieces import Section, code, drawing, figure, note, prefix
from slimstate.report.utilisation import differing_note, mean_utilisation


def comparable(traces: Iterable[Found[TraceRecord]]) -> list[list[TraceRecord]]:
    """Traces of the same text through models of the same shape, together; of each such group the uncut first."""
    groups: dict[object, list[TraceRecord]] = {}
    for found in traces:
        trace = found.record
        text = None if trace.text is None else trace.text.digest
        groups.setdefault((trace.layers, trace.heads, text), []).append(trace)
    return [sorted(group, key=lambda trace: trace.cut is not None) for group in groups.values()]


def state_section(traces: Sequence[Found[TraceRecord]], sweeps: Sequence[Found[SweepRecord]] = ()) -> Section | None:
    if not traces:
        return None
    groups = comparable(traces)
    bodies = [
        joined([group_heading(group) if len(groups) > 1 else None, group_body(group, number)])
        for number, group in enumerate(groups)
    ]
    return Section(
        anchor="states", title="How much of the state is used", body=joined([differing_note(sweeps, traces), *bodies])
    )


def group_heading(group: Sequence[TraceRecord]) -> Html:
    return element("h3", ", ".join(trace.name for trace in group))


def group_body(group: Sequence[TraceRecord], number: int) -> Html:
    typical = "Of the head whose utilisation is the median one of the first model"
    pictures = [
        figure(
            drawing(plots.utilisation_curves(group), prefix("utilisation", number), "Rank utilisation over tokens"),
            "Rank utilisation as the text goes on, a mean over layers and heads: 1 would mean that every direction of "
            "the state is as strong as the strongest, near 0 that one direction holds almost everything.",
        ),
        *head_maps(group),
        figure(
            drawing(plots.spectra(group), prefix("spectra", number), "Histograms of singular values"),
            f"{typical}: how often the singular values of its states have which size; what lies far to the left is "
            "hardly used.",
        ),
        figure(
            drawing(plots.ordered_spectra(group), prefix("spectrum", number), "Singular values by rank"),
            f"{typical}: its singular values from the largest to the smallest; the later a line falls, the more "
            "directions are in use.",
        ),
        retrieval_figure([trace for trace in group if trace.bounds.states], number),
    ]
    return joined([text_note(group[0]), *pictures])


def text_note(trace: TraceRecord) -> Html | None:
    text = trace.text
    if text is None or not text.data:
        return None
    size = f"{text.samples} x {text.length} tokens of " if text.samples and text.length else ""
    return note(f"States as the models read {size}", code(text.data), ".")


def head_maps(group: Sequence[TraceRecord]) -> list[Html]:
    """Utilisation and condition number by layer and head, one map for each model."""
    utilisation = common_scale([trace.utilisation_by_head for trace in group])
    kappa = common_scale([trace.kappa_by_head for trace in group], logarithmic=True)
    used = [
        heat_map(
            map_caption(trace, f"mean {fixed(mean_utilisation(trace), 3)}"),
            trace.layers,
            trace.utilisation_by_head,
            utilisation,
            lambda value: fixed(value, 2).removeprefix("0"),
            utilisation_tip(trace.capacity),
        )
        for trace in group
    ]
    conditions = [
        heat_map(
            map_caption(trace, f"median {median_words(trace.kappa_by_head)}"),
            trace.layers,
            trace.kappa_by_head,
            kappa,
            brief,
            lambda layer, head, value: f"layer {layer}, head {head}: condition number {magnitude(value)}",
        )
        for trace in group
    ]
    skipped = group[0].skip
    after = f" after the first {skipped} tokens" if skipped is not None else ""
    return [
        map_figure(
            "Rank utilisation by layer and head",
            used,
            legend(utilisation, lambda value: fixed(value, 2)),
            f"Mean rank utilisation of each head's states{after}, a row for each layer and a column for each head: "
            "bright heads use their state, dark ones could do with fewer channels.",
        ),
        map_figure(
            "Condition number by layer and head",
            conditions,
            legend(kappa, magnitude),
            f"Median condition number κ of each head's states{after}, the largest singular value over the smallest "
            "(logarithmic colours): the brighter, the more directions are next to empty; ∞ is singular.",
        ),
    ]


def map_caption(trace: TraceRecord, summary: str) -> Html:
    return joined([element("span", plots.label_of(trace)), element("span", summary)])


def utilisation_tip(capacity: float) -> Callable[[int, int, float | None], str]:
    def tip(layer: int, head: int, value: float | None) -> str:
        rank = "" if value is None else f"\neffective rank {value * capacity:.1f} of {capacity:g}"
        return f"layer {layer}, head {head}: utilisation {fixed(value, 3)}{rank}"

    return tip


def median_words(values: Sequence[Sequence[float | None]]) -> str:
    """Singular states count as infinite."""
    found = statistics.median_high(float("inf") if value is None else value for row in values for value in row)
    return magnitude(None if found == float("inf") else found)


def map_figure(title: str, maps: Sequence[Html], scale: Html, caption: str) -> Html:
    heading = element("h4", title)
    return element("figure", heading, element("div", *maps, class_="maps"), scale, element("figcaption", caption))


def retrieval_figure(traces: Sequence[TraceRecord], number: int) -> Html | None:
    if not traces:
        return None
    name = prefix("retrieval", number)
    picture = drawing(plots.retrieval(traces), name, "Amplification of query noise between its bounds")
    many = any(trace.bounds.states > plots.STATES_DRAWN for trace in traces)
    caption = (
        "Each dot is a state that was read with a noisy query: how many times larger the error of what comes out is "
        "than the error of the query; the bar behind it spans what the theorem allows."
    )
    share = f" Where more than {plots.STATES_DRAWN} states are within their bounds, an even share of them is drawn."
    return joined([bounds_words(traces), figure(picture, caption + share * many)])


def bounds_words(traces: Sequence[TraceRecord]) -> Html:
    states = sum(trace.bounds.states for trace in traces)
    outside = sum(trace.bounds.violations for trace in traces)
    verdict = "None" if not outside else f"{outside:,}"
    words = f" of {plural(states, 'sampled state')} {'is' if outside in (0, 1) else 'are'} outside of any bound."
    kind = "good" if not outside else "bad"
    return element("p", element("strong", verdict, class_=f"badge {kind}"), words, class_="recommended")


def filter_section(records: Sequence[Found[FiltersRecord]]) -> Section | None:
    if not records:
        return None
    reading = element(
        "p",
        "The short convolutions in front of queries, keys and values, in the first, the middle and the last layer. A "
        "column is the filter of one channel: red adds, blue subtracts, thin lines part the heads.",
    )
    bodies = [filter_figure(found.record, prefix("filters", number)) for number, found in enumerate(records)]
    return Section(anchor="filters", title="Convolution filters", body=joined([reading, *bodies]))


def filter_figure(record: FiltersRecord, name: str) -> Html:
    picture = drawing(plots.filter_maps(record), name, f"Convolution filters of {record.name}")
    return figure(picture, joined([element("strong", plots.label_of(record)), likeness_words(record)]))


def likeness_words(record: FiltersRecord) -> str | None:
    if not record.likeness:
        return None
    means = ", ".join(
        f"{role} {fixed(statistics.fmean(value for heads in layers.values() for value in heads), 3)}"
        for role, layers in record.likeness.items()
    )
    return f": how alike two filters of the same head are, over all layers (1 the same, 0 unrelated): {means}."
