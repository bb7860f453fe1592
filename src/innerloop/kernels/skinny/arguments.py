"""The kernels' argument structures, field for field as the sources in source/ lay them out."""

import ctypes


class LinearArgs(ctypes.Structure):
    """`Args` of source/linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "scale", "shift", "gate", "residual", "bias")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "out", "k_cache", "v_cache")),
        *((name, ctypes.c_void_p) for name in ("prefix", "clean_scale", "clean_shift", "clean_gate")),
        *((name, ctypes.c_uint64) for name in ("batch_stride", "row_stride")),
        *((name, ctypes.c_int) for name in ("rows", "row_tokens", "start", "groups", "heads", "kv_heads")),
        ("eps", ctypes.c_float),
    )


class AttendArgs(ctypes.Structure):
    """`Args` of source/attend.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "key_valid", "out")),
        *((name, ctypes.c_uint64) for name in ("batch_stride", "row_stride")),
        *((name, ctypes.c_int) for name in ("tokens", "keys", "start", "heads", "kv_heads")),
        ("scale", ctypes.c_float),
    )


class NormAttendArgs(ctypes.Structure):
    """`Args` of source/norm_attend.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "x", "scale", "shift", "bias", "k", "v", "key_valid", "out")),
        *((name, ctypes.c_uint64) for name in ("batch_stride", "row_stride")),
        *((name, ctypes.c_int) for name in ("tokens", "keys", "heads")),
        *((name, ctypes.c_float) for name in ("eps", "score_scale")),
    )


class StepArgs(ctypes.Structure):
    """`Args` of source/step.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "scale", "shift", "weight_out", "bias_out", "weight_in", "bias_in")
        ),
        *((name, ctypes.c_void_p) for name in ("state", "next_state", "previous", "guidance", "prefix", "out")),
        *((name, ctypes.c_float) for name in ("eps", "dt", "gain", "time")),
        ("row_tokens", ctypes.c_int),
    )
