"""Faults in statistics, alarms and fallbacks."""

from tests.planted.fault import Fault

_TESTS = "tests/torch_fp8/monitor"
FAULTS = [
    Fault(
        "the losses of a checkpoint are not restored",
        "torch_fp8/monitor/alarm.py",
        "        self.spikes.losses.extend(map(float, levels))\n",
        "",
        f"{_TESTS}/test_fallback.py",
    ),
    Fault(
        "the number of fallbacks of a layer is not restored",
        "torch_fp8/monitor/fallback.py",
        'self.times = {n: int(t) for n, t in state["times"].items() if n in known}',
        'self.times = {n: 1 for n, t in state["times"].items() if n in known}',
        f"{_TESTS}/test_fallback.py",
    ),
    Fault(
        "a layer returns after the same time each time",
        "torch_fp8/monitor/fallback.py",
        "wait = self.config.fallback_steps * 2 ** (self.times[name] - 1)",
        "wait = self.config.fallback_steps",
        f"{_TESTS}/test_fallback.py",
    ),
    Fault(
        "a spike widens the spread by which later ones are judged",
        "torch_fp8/monitor/alarm.py",
        "            if self._far < self.MOST:\n                return self.in_a_row\n",
        "            if self._far < self.MOST:\n"
        "                self.losses.append(loss)\n"
        "                return self.in_a_row\n",
        f"{_TESTS}/test_fallback.py {_TESTS}/test_faults.py {_TESTS}/test_robustness.py",
    ),
    Fault(
        "the least of a statistic over ranks is the largest",
        "torch_fp8/monitor/series.py",
        '{"max": 1.0, "min": -1.0, "mean": 0.0}',
        '{"max": 1.0, "min": 1.0, "mean": 0.0}',
        f"{_TESTS}",
    ),
    Fault(
        "a measured NaN counts as not measured",
        "torch_fp8/monitor/series.py",
        "parts.append(torch.where(value.isnan(), worst, value))",
        "parts.append(value)",
        f"{_TESTS}",
    ),
    Fault(
        "the marks of amaxes left out are counted twice",
        "torch_fp8/monitor/statistics.py",
        "return (marks.sum(1) - reported).clamp(min=0), marks[:, 0].float()",
        "return marks.sum(1).float(), marks[:, 0].float()",
        f"{_TESTS}",
    ),
    Fault(
        "what graphs saturated is reported in each measured step",
        "torch_fp8/monitor/parameters.py",
        '        reported["graphs"] = total\n',
        "",
        f"{_TESTS}/test_monitor.py",
    ),
    Fault(
        "what graphs saturated is no alarm",
        "torch_fp8/monitor/alarm.py",
        'Bound("graphs", "saturated", -INF, 0.0,',
        'Bound("graphs", "saturated", -INF, INF,',
        f"{_TESTS}/test_monitor.py",
    ),
    Fault(
        "experts without a token are no alarm",
        "torch_fp8/monitor/alarm.py",
        'Bound("experts", "empty", -INF, 0.0,',
        'Bound("experts", "empty", -INF, 1.0,',
        f"{_TESTS}",
    ),
    Fault(
        "a layer that falls back, or returns, leaves the forward in BF16",
        "torch_fp8/monitor/fallback.py",
        "            recipe = replace(recipe, bf16_forward=layer.fp8.recipe.bf16_forward)\n",
        "",
        "tests/torch_fp8/nn/test_bf16_forward.py",
    ),
]
