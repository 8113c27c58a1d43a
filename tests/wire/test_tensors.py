import numpy as np
import pytest
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from guerdon.errors import InvalidRequest
from guerdon.wire.tensors import DTYPES, Tensor, from_json, from_raw, to_raw


@pytest.mark.parametrize("datatype", sorted(set(DTYPES) - {"BF16"}))
def test_every_numeric_datatype_survives_the_round_trip(datatype):
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(DTYPES[datatype])
    tensor = Tensor.of("x", array)
    assert tensor.datatype == datatype == np_to_triton_dtype(array.dtype)
    assert to_raw(tensor) == array.tobytes()
    back = from_raw("x", datatype, (2, 3), to_raw(tensor))
    assert back.data.dtype == array.dtype
    assert back.data.tolist() == array.tolist()


def test_bf16_is_read_and_rounded_to_nearest_even():
    raw = bytes.fromhex("803f20c0")
    assert from_raw("x", "BF16", (2,), raw).data.tolist() == [1.0, -2.5]
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, np.nan, np.inf], np.float32)
    back = from_raw("x", "BF16", (4,), to_raw(Tensor("x", "BF16", (4,), ties))).data
    assert back[:2].tolist() == [1.0, 1 + 2**-6]
    assert np.isnan(back[2])
    assert np.isinf(back[3])


def test_bytes_are_laid_out_as_the_client_does():
    texts = ["", "plain", "Grüße 🙂"]
    raw = serialize_byte_tensor(np.array(texts, dtype=object)).item()
    tensor = Tensor.of_texts("x", texts)
    assert to_raw(tensor) == raw
    assert from_raw("x", "BYTES", (3, 1), raw).data == [text.encode() for text in texts]


def test_aligned_bytes_are_viewed_and_others_copied():
    buffer = np.arange(9, dtype=np.int64).tobytes()
    aligned = from_raw("x", "INT64", (8,), memoryview(buffer)[8:])
    assert np.shares_memory(aligned.data, np.frombuffer(buffer, np.uint8))
    shifted = from_raw("x", "INT64", (8,), memoryview(buffer)[3:67])
    assert shifted.data.flags.aligned
    assert shifted.data.tobytes() == buffer[3:67]


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "message"),
    [
        ("INT64", (2,), b"12345678", r"takes 16 bytes, but 8 came"),
        ("INT65", (1,), b"12345678", "unknown datatype 'INT65'"),
        ("BYTES", (1,), b"\x05\0\0\0abc", "cut off"),
        ("BYTES", (1,), b"\xff\xff\xff\xffabc", "cut off"),
        ("BYTES", (2,), b"\x01\0\0\0a", "takes 2 BYTES elements, but 1"),
        ("BYTES", (1,), b"\x01\0\0\0a\x01\0\0\0b", "5 bytes more"),
        ("BYTES", (2**40,), b"", "at most 1,048,576 are accepted"),
        ("INT64", (0, 2**61, 2**61), b"", "too large"),
    ],
)
def test_raw_bytes_that_do_not_fit_are_refused(datatype, shape, raw, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        from_raw("ids", datatype, shape, raw)
    assert "'ids'" in str(caught.value)


def test_json_data_may_be_flat_or_nested():
    for data in ([1, 2, 3, 4], [[1, 2], [3, 4]]):
        assert from_json("x", "INT32", (2, 2), data).data.tolist() == [[1, 2], [3, 4]]
    for data in (["a", "ü"], [["a"], ["ü"]]):
        assert from_json("x", "BYTES", (2, 1), data).data == [b"a", "ü".encode()]
    assert np.isnan(from_json("x", "FP32", (2,), [1, None]).data[1])
    assert from_json("x", "INT64", (0, 3), []).data.shape == (0, 3)


@pytest.mark.parametrize(
    ("datatype", "shape", "data", "message"),
    [
        ("INT64", (2,), [1, 2, 3], "takes 2 elements, but 3 came"),
        ("INT64", (2, 2), [[1, 2], [3]], "rows differ"),
        ("INT64", (1,), [1.5], "not INT64"),
        ("INT64", (1,), [True], "not INT64"),
        ("INT64", (1,), ["1"], "not INT64"),
        ("INT64", (1,), [None], "not INT64"),
        ("INT64", (1,), [2**70], "not INT64"),
        ("INT64", (1,), [2**63], "outside INT64"),
        ("INT32", (2,), [0, 2**31], "outside INT32"),
        ("UINT8", (1,), [-1], "-1 is outside UINT8"),
        ("FP32", (1,), ["1"], "not FP32"),
        ("FP32", (2,), [1.0, {}], "not FP32"),
        ("BOOL", (1,), [1], "not BOOL"),
        ("BYTES", (1,), [1], "not a string"),
        ("BYTES", (1,), None, "not a string"),
        ("BYTES", (1,), [[[[[[[[[[[[[[[[[[["deep"]]]]]]]]]]]]]]]]]]], "not a string"),
        ("BYTES", (2,), ["a"], "takes 2 elements, but 1 came"),
    ],
)
def test_json_data_that_does_not_fit_is_refused(datatype, shape, data, message):
    with pytest.raises(InvalidRequest, match=message):
        from_json("x", datatype, shape, data)
