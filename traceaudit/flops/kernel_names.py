"""What the name of a kernel tells of its element type and the units it runs on."""

import re

# The first that matches; element type as in the peak table, and the bytes of its elements.
DTYPES: tuple[tuple[re.Pattern[str], str, float], ...] = (
    (re.compile(r"mxfp4|nvfp4|e2m1|fp4"), "fp4", 0.5),
    (re.compile(r"e4m3|e5m2|fp8|float8|_f8_|F8"), "fp8", 1),
    (re.compile(r"bf16|[Bb][Ff]loat16|_B(?:BS|SS)?_|DF16b|bfloat"), "bf16", 2),
    (re.compile(r"[hH]alf|h(?:16816|1688|884|gemm)|[fF]p?16(?!8)|_H(?:HS|B|SS)_"), "fp16", 2),
    (re.compile(r"tf32|s1688"), "tf32", 4),
    (re.compile(r"float|f32|sgemm|scudnn|_SB_"), "fp32", 4),
    (re.compile(r"double|dgemm|f64"), "", 8),
)

OPAQUE = re.compile(r"OpaqueType<(\d+)u?>")  # copies that know only the size of an element

# Kernels whose names say that they use matrix units (tensor cores, MFMA, WGMMA).
MATRIX_UNITS = re.compile(
    r"tensorop|wgmma|hmma|imma|s1688|h?16816|h1688|h884|s884|xmma|nvjet|sm(?:80|90|100|120)_|gmma|mma_|umma|_MI\d+x|mfma"
    r"|flash_(?:fwd|bwd)|fmha|deep_gemm|cudnn_generated_fort_native_sdpa|wmma",
    re.IGNORECASE,
)
PLAIN_UNITS = re.compile(
    r"sgemm|dgemm|simt|scudnn|gemv|gemmk1|volta_[sd]|maxwell_|ampere_sgemm|implicit_convolve_sgemm"
)


def dtype_of(name: str) -> tuple[str, float]:
    """Return the element type a kernel's name tells and its bytes, ("", 0) where it tells none.

    >>> dtype_of("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"), dtype_of("ampere_sgemm_128x64_tn")
    (('bf16', 2), ('fp32', 4))
    """
    opaque = OPAQUE.search(name)
    if opaque:
        return "", int(opaque[1])
    return next(((dtype, size) for pattern, dtype, size in DTYPES if pattern.search(name)), ("", 0))


def uses_tf32(name: str) -> bool:
    """Tell whether an fp32 kernel's name says that it rounds to TF32."""
    return "tf32" in name or "s1688" in name


def uses_matrix_units(name: str) -> bool | None:
    """Tell whether a kernel runs on matrix units, None where its name does not say.

    >>> [uses_matrix_units(name) for name in ("nvjet_tst_128x256", "volta_sgemm_128x64_tn", "my_kernel")]
    [True, False, None]
    """
    if PLAIN_UNITS.search(name):
        return False
    return True if MATRIX_UNITS.search(name) else None
