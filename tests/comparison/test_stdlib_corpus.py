"""Files and functions taken from a library."""

import textwrap

from stdlib_corpus import documented_functions, is_held_out


def test_a_function_is_parted_from_its_docstring(tmp_path):
    """One without a docstring or a body is passed over."""
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

        async def wait():
            """Wait for it."""
            await it

        def no_docstring(x):
            return x

        def no_body(x):
            """Return nothing."""

        def one_line(x): "doc"; return x
    '''
    path = tmp_path / "module.py"
    path.write_text(textwrap.dedent(source))
    assert sorted(documented_functions(path)) == [
        ("async def wait():\n    await it", "Wait for it."),
        ("def half(self, x):\n    # why: see above\n    return x / 2", "Return the half of x."),
    ]


def test_about_a_tenth_is_held_out_by_name_alone(tmp_path):
    paths = [tmp_path / f"package/module_{i}.py" for i in range(1000)]
    held_out = [path.name for path in paths if is_held_out(path)]
    assert 60 < len(held_out) < 140
    elsewhere = [tmp_path / "other" / "package" / path.name for path in paths]
    assert [path.name for path in elsewhere if is_held_out(path)] == held_out
