"""Files and functions taken from a library."""

import ast
import textwrap

import pytest
from stdlib_corpus import documented_functions, is_held_out, source_files


def functions_of(tmp_path, source: str) -> list[tuple[str, str]]:
    path = tmp_path / "module.py"
    path.write_text(textwrap.dedent(source))
    return list(documented_functions(path))


def test_a_function_is_parted_from_its_docstring(tmp_path):
    source = '''
        class A:
            @property
            def half(self, x):
                """Return the half
                of x.

                Not of y.
                """
                # why: see above
                return x / 2
    '''
    expected = "def half(self, x):\n    # why: see above\n    return x / 2"
    assert functions_of(tmp_path, source) == [(expected, "Return the half of x.")]


def test_functions_without_a_docstring_or_a_body_are_passed_over(tmp_path):
    source = '''
        def no_docstring(x):
            return x

        def no_body(x):
            """Return nothing."""

        def one_line(x): "doc"; return x
    '''
    assert functions_of(tmp_path, source) == []


def test_async_functions_are_functions(tmp_path):
    source = '''
        async def wait():
            """Wait for it."""
            await it
    '''
    assert functions_of(tmp_path, source) == [("async def wait():\n    await it", "Wait for it.")]


@pytest.mark.long
def test_the_library_is_listed_in_order_without_tests_and_packages():
    files = source_files(one_in=16)
    assert files == sorted(files) == source_files(one_in=16)
    assert 10 < len(files) < 120
    assert not {"test", "tests", "site-packages"} & {part for f in files for part in f.parts[4:]}
    for path in files:
        ast.parse(path.read_text(encoding="utf-8"))


def test_files_that_do_not_parse_are_left_out(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_text("print 'python 2'\n")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'\n")
    assert [path.name for path in source_files(tmp_path)] == ["good.py"]


def test_about_a_tenth_is_held_out_by_name_alone(tmp_path):
    paths = [tmp_path / f"package/module_{i}.py" for i in range(1000)]
    held_out = [path.name for path in paths if is_held_out(path)]
    assert 60 < len(held_out) < 140
    elsewhere = [tmp_path / "other" / "package" / path.name for path in paths]
    assert [path.name for path in elsewhere if is_held_out(path)] == held_out
