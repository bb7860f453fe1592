"""The pickles of LeRobot's stock client, read as plain data and written by hand; nothing in them is ever run.

The reader walks the opcodes itself: it imports nothing, calls nothing that a message names, and knows exactly
the classes below. Formats: lerobot/async_inference/helpers.py (0.6.1), numpy's and torch's array reductions.
"""

import io
import math
import pickletools
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from innerloop.client.packing import MessageError, array_dtype, array_from

HELPERS = "lerobot.async_inference.helpers"
MAX_OPCODES = 20_000  # an observation has about ten a picture and four a motor
MAX_VALUES = 20_000
MAX_DEPTH = 6


@dataclass
class TimedObservation:
    """What LeRobot's client sends each time: `observation` maps motor, camera and task names to values."""

    timestamp: float = 0.0
    timestep: int = 0
    observation: dict[str, Any] = field(default_factory=dict)
    must_go: bool = False


@dataclass
class RemotePolicyConfig:
    """What LeRobot's client sends first: `lerobot_features` says which motors make up the state, in which order."""

    policy_type: str = ""
    pretrained_name_or_path: str = ""
    lerobot_features: dict[str, Any] = field(default_factory=dict)
    actions_per_chunk: int = 1
    device: str = ""
    rename_map: dict[str, str] = field(default_factory=dict)


MESSAGES = {"TimedObservation": TimedObservation, "RemotePolicyConfig": RemotePolicyConfig}


@dataclass(frozen=True)
class _Name:
    """A global that a pickle mentions: only compared with names, never imported."""

    module: str
    name: str


@dataclass
class _Array:
    """An array or dtype under construction, as data."""

    kind: str  # "array", "dtype", "storage"
    state: Any = None


_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMERIC = ("numpy.core.numeric", "numpy._core.numeric")
_STORAGES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "ByteStorage": "|u1",
    "CharStorage": "|i1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "BoolStorage": "|b1",
}


def read_pickle(data: bytes) -> TimedObservation | RemotePolicyConfig:
    """One of the two messages. Raises MessageError for anything else, saying what was refused."""
    try:
        value = _Finisher().finish(_Reader(len(data)).read(io.BytesIO(data)))
    except MessageError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise MessageError(f"the pickle is damaged or not of the expected form: {error}") from error
    if not isinstance(value, (TimedObservation, RemotePolicyConfig)):
        raise MessageError(f"a {type(value).__name__} was sent where one of {', '.join(MESSAGES)} is expected")
    return value


def write_timed_actions(actions: np.ndarray, timestamp: float, timestep: int, interval: float) -> bytes:
    """`[TimedAction, ...]` of [n, dim] float32 as a pickle that LeRobot's client reads as its own classes.

    Action i is due at `timestamp + i * interval` and is number `timestep + i`.
    """
    timed = f"c{HELPERS}\nTimedAction\n".encode()
    out = [b"\x80\x02]("]
    for index, action in enumerate(np.asarray(actions, np.float64)):
        values = b"".join(b"G" + struct.pack(">d", value) for value in action)
        tensor = b"ctorch\ntensor\n(](" + values + b"etR"
        number = b"\x8a\x08" + struct.pack("<q", timestep + index)
        out.append(timed + b"(G" + struct.pack(">d", timestamp + index * interval) + number + tensor + b"tR")
    out.append(b"e.")
    return b"".join(out)


class _Reader:
    """A machine with a stack and a memo, as pickle's, for the opcodes that these messages need.

    `budget`: bytes that arrays may be made of in all, so that one buffer cannot be unfolded many times.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, stream: io.BytesIO) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if count > MAX_OPCODES:
                raise MessageError(f"the pickle has more than {MAX_OPCODES} opcodes")
            if opcode.name == "STOP":
                break
            if opcode.name in _LITERALS:
                self._stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name]())
            else:
                self._step(opcode.name, argument)
        return self._stack.pop()

    def _step(self, name: str, argument: Any) -> None:
        step = _STEPS.get(name)
        if step is None:
            raise MessageError(f"the pickle uses {name}, which no expected message needs; it is refused")
        step(self, argument)

    def mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def since_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def tuple_of(self, count: int | None) -> None:
        if count is None:
            items = self.since_mark()
        elif count > len(self._stack):
            raise MessageError("the pickle takes more from its stack than it put there")
        else:
            items = self._stack[-count:]
            del self._stack[-count:]
        self._stack.append(tuple(items))

    def append(self, items: Iterable[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise MessageError("the pickle appends to something that is not a list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise MessageError("the pickle sets items of something that is not a map")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int)):
                raise MessageError("the pickle has a map key that is neither text nor number")
            target[key] = value

    def pop_pair(self) -> list[Any]:
        value, key = self._stack.pop(), self._stack.pop()
        return [key, value]

    def remember(self, slot: int | None) -> None:
        self._memo[len(self._memo) if slot is None else slot] = self._stack[-1]

    def recall(self, slot: int) -> None:
        self._stack.append(self._memo[slot])

    def name(self, text: str | None) -> None:
        if text is None:
            attribute, module = self._stack.pop(), self._stack.pop()
        else:
            module, _, attribute = text.partition(" ")
        self._stack.append(_allowed(_Name(str(module), str(attribute))))

    def new(self, _: Any) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name) or name.module != HELPERS or arguments != ():
            raise MessageError("the pickle builds an object that no expected message holds")
        self._stack.append(MESSAGES[name.name]())

    def reduce(self, _: Any) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise MessageError("the pickle calls something that is not a name")
        self._budget -= sum(len(item) for item in arguments if isinstance(item, (bytes, bytearray)))
        if self._budget < 0:
            raise MessageError("the pickle makes more array bytes than it has")
        self._stack.append(_construct(name, arguments))

    def persistent(self, _: Any) -> None:
        kind, name, key, device, count, *_ = self._stack.pop()
        if kind != "storage" or not isinstance(name, _Name) or name.module != "torch" or device != "cpu":
            raise MessageError("a tensor in the pickle is not on the CPU")
        self._stack.append(_Array("storage", (array_dtype(_STORAGES[name.name]), key, count)))

    def build(self, _: Any) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, _Array):
            target.state = state if target.kind == "array" else (*target.state, state)
        elif isinstance(target, (TimedObservation, RemotePolicyConfig)) and isinstance(state, dict):
            for key, value in state.items():
                if key not in target.__dataclass_fields__:
                    raise MessageError(f"the pickle sets '{key}' of a {type(target).__name__}")
                setattr(target, key, value)
        else:
            raise MessageError("the pickle sets the state of something that has none")


def _allowed(name: _Name) -> _Name:
    known = (
        (name.module == HELPERS and name.name in MESSAGES)
        or (name.module in _ARRAYS and name.name in ("_reconstruct", "scalar"))
        or (name.module in _NUMERIC and name.name == "_frombuffer")
        or (name.module == "numpy" and name.name in ("ndarray", "dtype"))
        or (name.module == "torch._utils" and name.name == "_rebuild_tensor_v2")
        or (name.module == "torch.storage" and name.name == "_load_from_bytes")
        or (name.module == "torch" and name.name in _STORAGES)
        or (name.module == "collections" and name.name == "OrderedDict")
    )
    if not known:
        raise MessageError(f"the pickle names {name.module}.{name.name}; only observations and arrays are accepted")
    return name


def _construct(name: _Name, arguments: tuple[Any, ...]) -> Any:
    if name.name == "_reconstruct":
        return _Array("array")
    if name.name == "dtype":
        return _Array("dtype", (arguments[0],))
    if name.name == "scalar":
        dtype, data = arguments
        return array_from(data, _dtype(dtype), (1,))[0]
    if name.name == "_frombuffer":
        data, dtype, shape, order = arguments
        return _ordered(bytes(data), _dtype(dtype), shape, order == "F")
    if name.name == "_load_from_bytes":
        return _storage(bytes(arguments[0]))
    if name.name == "_rebuild_tensor_v2":
        return _tensor(*arguments[:4])
    if name.name == "OrderedDict" and not arguments:
        return {}
    raise MessageError(f"the pickle calls {name.module}.{name.name}, which is refused")


def _storage(data: bytes) -> np.ndarray:
    """A flat array from torch's legacy stream: magic number, version, sizes, type, keys, count, raw elements."""
    stream = io.BytesIO(data)
    for _ in range(3):
        _Reader(0).read(stream)
    described = _Reader(0).read(stream)
    keys = _Reader(0).read(stream)
    if not isinstance(described, _Array) or described.kind != "storage" or keys != [described.state[1]]:
        raise MessageError("a tensor in the pickle has no plain storage")
    dtype, _, count = described.state
    if struct.unpack("<q", stream.read(8)) != (count,):
        raise MessageError("a tensor in the pickle has another size than it says")
    return array_from(stream.read(), dtype, (count,))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any) -> np.ndarray:
    if not isinstance(storage, np.ndarray) or len(size) != len(stride):
        raise MessageError("a tensor in the pickle has no plain storage")
    if any(type(number) is not int or number < 0 for number in (offset, *size, *stride)):
        raise MessageError("a tensor in the pickle has sizes that are not whole numbers")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if math.prod(size) > storage.size or (math.prod(size) and last >= storage.size):
        raise MessageError("a tensor in the pickle reaches beyond its storage")
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)


def _dtype(value: Any) -> np.dtype[Any]:
    if not isinstance(value, _Array) or value.kind != "dtype":
        raise MessageError("an array in the pickle has no dtype")
    order = value.state[1][1] if len(value.state) > 1 else "|"
    return array_dtype((order if order in ("<", ">") else "") + str(value.state[0]))


def _ordered(data: bytes, dtype: np.dtype[Any], shape: Any, fortran: bool) -> np.ndarray:
    if not fortran:
        return array_from(data, dtype, shape)
    return array_from(data, dtype, tuple(reversed(shape))).transpose()


class _Finisher:
    """Turns what the reader left into plain data with arrays, and counts, since a pickle may share parts."""

    def __init__(self) -> None:
        self._count = 0

    def finish(self, value: Any, depth: int = 0) -> Any:
        self._count += 1
        if self._count > MAX_VALUES or depth > MAX_DEPTH:
            raise MessageError(f"the pickle unfolds to more than {MAX_VALUES} values or {MAX_DEPTH} levels")
        if isinstance(value, _Array):
            return _array(value)
        if isinstance(value, (TimedObservation, RemotePolicyConfig)):
            return replace(value, **{key: self.finish(item, depth + 1) for key, item in vars(value).items()})
        if isinstance(value, dict):
            return {key: self.finish(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.finish(item, depth + 1) for item in value]
        if isinstance(value, (str, int, float, bool, np.ndarray, np.generic, type(None))):
            return value
        raise MessageError(f"the pickle holds a {type(value).__name__.strip('_')} where a value is expected")


def _array(value: _Array) -> np.ndarray:
    if value.kind != "array" or value.state is None:
        raise MessageError("the pickle holds an array without content")
    _, shape, dtype, fortran, data = value.state
    return _ordered(data, _dtype(dtype), shape, bool(fortran))


_LITERALS = {
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    "PROTO": lambda reader, _: None,
    "FRAME": lambda reader, _: None,
    "MARK": _Reader.mark,
    "TUPLE": lambda reader, _: reader.tuple_of(None),
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "APPEND": lambda reader, _: reader.append([reader._stack.pop()]),
    "APPENDS": lambda reader, _: reader.append(reader.since_mark()),
    "SETITEM": lambda reader, _: reader.set_items(reader.pop_pair()),
    "SETITEMS": lambda reader, _: reader.set_items(reader.since_mark()),
    "MEMOIZE": lambda reader, _: reader.remember(None),
    "BINPUT": lambda reader, slot: reader.remember(slot),
    "LONG_BINPUT": lambda reader, slot: reader.remember(slot),
    "BINGET": lambda reader, slot: reader.recall(slot),
    "LONG_BINGET": lambda reader, slot: reader.recall(slot),
    "GLOBAL": lambda reader, text: reader.name(text),
    "STACK_GLOBAL": lambda reader, _: reader.name(None),
    "NEWOBJ": _Reader.new,
    "REDUCE": _Reader.reduce,
    "BUILD": _Reader.build,
    "BINPERSID": _Reader.persistent,
}
