"""Faults in statistics, alarms and fallbacks."""

_TESTS = "tests/torch_fp8/monitor"
FAULTS = {
    ("torch_fp8/monitor/alarm.py", f"{_TESTS}/test_fallback.py"): (
        "the losses of a checkpoint are not restored",
        "        self.spikes.losses.extend(map(float, levels))\n",
        "",
    ),
    (
        "torch_fp8/monitor/alarm.py",
        f"{_TESTS}/test_fallback.py {_TESTS}/test_faults.py {_TESTS}/test_robustness.py",
    ): (
        "a spike widens the spread by which later ones are judged",
        "            if self._far < self.MOST:\n                return self.in_a_row\n",
        (
            "            if self._far < self.MOST:\n"
            "                self.losses.append(loss)\n"
            "                return self.in_a_row\n"
        ),
    ),
    ("torch_fp8/monitor/alarm.py", f"{_TESTS}/test_monitor.py"): (
        "what graphs saturated is no alarm",
        'Bound("graphs", "saturated", -INF, 0.0,',
        'Bound("graphs", "saturated", -INF, INF,',
    ),
    ("torch_fp8/monitor/alarm.py", f"{_TESTS}"): (
        "experts without a token are no alarm",
        'Bound("experts", "empty", -INF, 0.0,',
        'Bound("experts", "empty", -INF, 1.0,',
    ),
    ("torch_fp8/monitor/fallback.py", f"{_TESTS}/test_fallback.py"): (
        "a layer returns although its alarms go on",
        '                self.fallen[name]["last"] = step\n',
        "",
        "a layer that returns has the histories from before",
        "        layer.reset_scaling()\n",
        "",
        "the number of fallbacks of a layer is not restored",
        'self.times = {n: int(t) for n, t in state["times"].items() if n in known}',
        'self.times = {n: 1 for n, t in state["times"].items() if n in known}',
        "a layer returns after the same time each time",
        "wait = self.config.fallback_steps * 2 ** (self.times[name] - 1)",
        "wait = self.config.fallback_steps",
    ),
    ("torch_fp8/monitor/fallback.py", "tests/torch_fp8/nn/test_bf16_forward.py"): (
        "a layer that falls back, or returns, leaves the forward in BF16",
        "            recipe = replace(recipe, bf16_forward=layer.fp8.recipe.bf16_forward)\n",
        "",
    ),
    ("torch_fp8/monitor/series.py", f"{_TESTS}"): (
        "the least of a statistic over ranks is the largest",
        '{"max": 1.0, "min": -1.0, "mean": 0.0}',
        '{"max": 1.0, "min": 1.0, "mean": 0.0}',
        "a measured NaN counts as not measured",
        "parts.append(torch.where(value.isnan(), worst, value))",
        "parts.append(value)",
    ),
    ("torch_fp8/monitor/statistics.py", f"{_TESTS}"): (
        "the marks of amaxes left out are counted twice",
        "return (marks.sum(1) - reported).clamp(min=0), marks[:, 0].float()",
        "return marks.sum(1).float(), marks[:, 0].float()",
    ),
    ("torch_fp8/monitor/parameters.py", f"{_TESTS}/test_monitor.py"): (
        "what graphs saturated is reported in each measured step",
        '        reported["graphs"] = total\n',
        "",
    ),
}
