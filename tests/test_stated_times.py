import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIME = re.compile(
    r"\d[\d.]* (us|ms|µs|seconds?)\b|\ba (third|quarter|fifth|tenth) (of|less) .{0,20}time"
)


def test_no_docstring_or_comment_states_a_time_that_nobody_can_measure_again():
    """A time is of one machine: it stands in a CSV, with the command that measured it."""
    for package in ("torch_fp8", "torch_fp8_tools", "lightning_fp8", "accelerate_fp8"):
        for path in (ROOT / package).rglob("*.py"):
            tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
            for token in tokens:
                if token.type == tokenize.COMMENT or token.string.startswith('"""'):
                    stated = TIME.search(" ".join(token.string.split()))
                    assert stated is None, (path.name, token.start[0], stated[0])
