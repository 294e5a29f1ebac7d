"""Report of `coserve plan`: one page that loads nothing."""

from typing import Any

from coserve.bench.charts import Axis, chart, line, nice_high, number, stacks
from coserve.bench.plan import Plan, short_of_slos
from coserve.bench.report import escape, figure, page, section, subtitle


def plan_html(result: dict[str, Any], plan: Plan) -> str:
    """Return the page of a plan and of the result that was printed as JSON."""
    title = "What a trace leaves over"
    short = short_of_slos(plan)
    words = (
        f"{plan.num_devices} × {plan.place} serve the trace with SLOs of "
        f"{number(1e3 * plan.slo.ttft_s)} ms to the "
        f"first token and {number(1e3 * plan.slo.tpot_s)} ms per later one; a device alone holds "
        f"{number(plan.saturation)} requests/s. In {number(plan.num_hours)} hours they also "
        f"train "
        f"{number(plan.tuning_tokens)} tokens, at a cost of {number(result['cost'])}. To train as "
        f"many on separate "
        f"devices takes {number(plan.num_more_devices)} more of them: "
        f"{result['separate_devices']} in all, "
        f"{number(result['separate_cost'])}."
    )
    if short:
        words += (
            f" Fewer than 99% of requests held both SLOs in the hours {', '.join(map(str, short))}."
        )
    charts = _rates(plan) + _left_over(plan)
    error = f'<p class="note">{escape(result["model_error"]["words"])}</p>'
    body = f'<p>{escape(words)}</p>{error}<div class="pair">{charts}</div>{_table(result)}'
    return page(title, f"<h1>{title}</h1>{subtitle(result)}{section('Hour by hour', body)}")


def _rates(plan: Plan) -> str:
    points = [
        (index + at, hour.rate / plan.num_devices)
        for index, hour in enumerate(plan.hours)
        for at in (0.0, 1.0)
    ]
    high = nice_high([*(rate for _, rate in points), plan.saturation], least=1e-3)
    y = Axis(label="requests/s", low=0, high=high)
    most = line([(0, plan.saturation), (len(plan.hours), plan.saturation)], "ink", dashed=True)
    caption = "Requests of each device (dashed: what one holds without jobs)"
    return figure(caption, chart(caption, _hours(plan), y, [line(points, "blue"), most]))


def _left_over(plan: Plan) -> str:
    bars = [
        (index + 0.1, index + 0.9, [hour.tuning_tokens_per_s])
        for index, hour in enumerate(plan.hours)
    ]
    high = nice_high((hour.tuning_tokens_per_s for hour in plan.hours), least=1e-3)
    y = Axis(label="tuning tokens/s, all devices", low=0, high=high)
    caption = "Fine-tuning in what requests leave over"
    return figure(
        caption, chart(caption, _hours(plan), y, [stacks(bars, ["tokens/s"], ["orange"])])
    )


def _hours(plan: Plan) -> Axis:
    return Axis(label="hour", low=0, high=len(plan.hours))


def _table(result: dict[str, Any]) -> str:
    names = ("hour", "requests/s", "held both SLOs", "tuning tokens/s", "tuning tokens")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(
        f"<tr><td>{row['hour']}</td><td>{number(row['rate'])}</td><td>{row['attainment']:.1%}</td>"
        f"<td>{number(row['tuning_tokens_per_s'])}</td><td>{number(row['tuning_tokens'])}</td></tr>"
        for row in result["rows"]
    )
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table class="numbers">{table}</table></div>'
