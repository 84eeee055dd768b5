"""How numbers and foreign text are written, in every report."""

import re
from collections.abc import Sequence

_HASH = re.compile(r"\b(?=\w*\d)[a-z0-9]{32,}\b")
_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def percent(share: float) -> str:
    """Write a share of one.

    >>> percent(0.1234), percent(0.0001), percent(0.0)
    ('12.3 %', '<0.1 %', '0.0 %')
    """
    if 0 < abs(share) < 0.0005:
        return "<0.1 %"
    return f"{100 * share + 0.0:.1f} %"


def milliseconds(ns: float, digits: int = 3) -> str:
    """Write a duration of nanoseconds in milliseconds.

    >>> milliseconds(1_234_000), milliseconds(1_234_567_890, 1)
    ('1.234 ms', '1,234.6 ms')
    """
    return f"{ns / 1e6:,.{digits}f} ms"


def duration(ns: float) -> str:
    """Write a duration in the unit that suits it, up to milliseconds.

    >>> duration(659), duration(1_226), duration(910_463), duration(25_743_356)
    ('659 ns', '1.2 µs', '910 µs', '25.7 ms')
    """
    if abs(ns) < 1e3:
        return f"{ns:.0f} ns"
    if abs(ns) < 99_950:
        return f"{ns / 1e3:.1f} µs"
    return f"{ns / 1e3:.0f} µs" if abs(ns) < 999_500 else milliseconds(ns, 1)


def times(ratio: float) -> str:
    """Write how many times as much something is.

    >>> times(1.1291), times(12.0)
    ('1.13x', '12.00x')
    """
    return f"{ratio:.2f}x"


def bandwidth(gb_per_s: float) -> str:
    """Write a rate in the unit of NCCL's tests.

    >>> bandwidth(303.453), bandwidth(0.00004)
    ('303.5 GB/s', '<0.1 GB/s')
    """
    return "<0.1 GB/s" if 0 < gb_per_s < 0.05 else f"{gb_per_s:,.1f} GB/s"


def quantity(value: float, unit: str) -> str:
    """Write a value with a decimal prefix.

    >>> quantity(1.5e9, "B"), quantity(12, "B"), quantity(6.1e15, "FLOP")
    ('1.50 GB', '12 B', '6.10 PFLOP')
    """
    for size, prefix in _SI:
        if abs(value) >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return f"{value:g} {unit}"


def plural(count: int, noun: str) -> str:
    """Write a count and its noun.

    >>> plural(1, "rank"), plural(4096, "rank")
    ('1 rank', '4,096 ranks')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(words: Sequence[str]) -> str:
    """Join words as a sentence does.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def numbers(values: Sequence[int]) -> str:
    """Write whole numbers, runs of three and more as a range.

    >>> numbers([3, 4, 5, 9, 10])
    '3 to 5, 9, 10'
    """
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def clean(text: object, limit: int = 200) -> str:
    """Return text from a trace without control characters, which could steer a terminal or reverse a line.

    >>> clean("a" + chr(27) + "[31mb"), clean("abcdef", limit=4)
    ('a�[31mb', 'abc…')
    """
    whole = str(text)
    printable = whole
    if not whole.isprintable():
        printable = "".join(character if character.isprintable() else "\ufffd" for character in whole)
    return printable if len(printable) <= limit else printable[: limit - 1] + "…"


def kernel_title(name: object, limit: int = 26) -> str:
    """Return what tells a kernel from others in a sentence: no namespaces, template arguments or parameters.

    >>> kernel_title("void at::native::(anonymous namespace)::layer_norm_kernel<float, at::Half>(int, float*)")
    'layer_norm_kernel'
    >>> kernel_title("Memcpy DtoD (Device -> Device)"), kernel_title("sm90_gemm_bf16bf16", limit=12)
    ('Memcpy DtoD', 'sm90_gemm_b…')
    """
    whole = str(name).removeprefix("void ").replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    short = whole.split("<")[0].split("(")[0].split("::")[-1].strip()
    return clean(short or whole, limit)


def call_title(name: object, limit: int = 90) -> str:
    """Return what tells a host call or annotation from others: no wrapper's prefix, marks or long hash.

    >>> call_title("autograd::engine::evaluate_function: MmBackward0"), call_title("## forward ##")
    ('MmBackward0', 'forward')
    >>> call_title("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    '_SingleProcessDataLoaderIter.__next__'
    >>> call_title("## Call CompiledFxGraph f7p6gslkv3uwbkhsf7qhhobwgh7c6574rsndaccx7kmlup7cn5jf ##")
    'Call CompiledFxGraph f7p6gslk…'
    """
    whole = str(name)
    whole = _HASH.sub(lambda found: found[0][:8] + "…", whole)
    short = whole.removeprefix("autograd::engine::evaluate_function: ").removeprefix("enumerate(DataLoader)#")
    return clean(short.strip("# ") or whole, limit)
