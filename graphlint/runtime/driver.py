"""The grouped copy of a replay, asked of the CUDA driver directly.

`torch._foreach_copy_` costs the host 6 microseconds for one tensor and 15 for 32 (NVIDIA H200, torch 2.11), most of it
dispatch that finds out what a captured graph knows already: same shapes, same strides, same device. Here the addresses
go into a parameter block, and one launch moves the bytes. Where the driver can't be asked, torch's copy does the work.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphlint.runtime.backend import Copies

MOST = 128  # tensors in one launch: three addresses each in the 4 KiB of a kernel's parameters
_THREADS, _BLOCKS, _LEAST_BLOCKS = 256, 2048, 128
_MOST_TOGETHER = 4 << 20  # bytes of several tensors; beyond, moving them takes longer than torch's host work

# Block row y copies tensor y, 16 bytes a thread where both addresses allow it, else 4, else 1.
_PTX = """
.version 7.0
.target sm_70
.address_size 64

.visible .entry graphlint_copies(.param .align 8 .b8 block[{whole}])
{{
    .reg .pred %p;
    .reg .b16 %byte;
    .reg .b32 %row, %x, %n, %v<4>;
    .reg .b64 %at, %to, %from, %bytes, %first, %step, %low, %i, %end, %o, %s, %d;

    mov.u32 %row, %ctaid.y;
    mov.u64 %at, block;
    mad.wide.u32 %at, %row, 8, %at;
    ld.param.u64 %to, [%at];
    ld.param.u64 %from, [%at+{from_}];
    ld.param.u64 %bytes, [%at+{bytes_}];
    mov.u32 %x, %ctaid.x;
    mov.u32 %n, %ntid.x;
    mul.wide.u32 %first, %x, %n;
    mov.u32 %x, %tid.x;
    cvt.u64.u32 %i, %x;
    add.u64 %first, %first, %i;
    mov.u32 %x, %nctaid.x;
    mul.wide.u32 %step, %x, %n;
    or.b64 %low, %to, %from;
    mov.u64 %i, %first;
    and.b64 %o, %low, 15;
    setp.ne.u64 %p, %o, 0;
    @%p bra WORDS;
    shr.u64 %end, %bytes, 4;
SIXTEEN:
    setp.ge.u64 %p, %i, %end;
    @%p bra SIXTEEN_DONE;
    shl.b64 %o, %i, 4;
    add.u64 %s, %from, %o;
    add.u64 %d, %to, %o;
    ld.global.v4.u32 {{%v0, %v1, %v2, %v3}}, [%s];
    st.global.v4.u32 [%d], {{%v0, %v1, %v2, %v3}};
    add.u64 %i, %i, %step;
    bra SIXTEEN;
SIXTEEN_DONE:
    and.b64 %o, %bytes, 15;
    sub.u64 %i, %bytes, %o;
    add.u64 %i, %i, %first;
    bra BYTES;
WORDS:
    and.b64 %o, %low, 3;
    setp.ne.u64 %p, %o, 0;
    @%p bra BYTES;
    shr.u64 %end, %bytes, 2;
FOUR:
    setp.ge.u64 %p, %i, %end;
    @%p bra FOUR_DONE;
    shl.b64 %o, %i, 2;
    add.u64 %s, %from, %o;
    add.u64 %d, %to, %o;
    ld.global.u32 %v0, [%s];
    st.global.u32 [%d], %v0;
    add.u64 %i, %i, %step;
    bra FOUR;
FOUR_DONE:
    and.b64 %o, %bytes, 3;
    sub.u64 %i, %bytes, %o;
    add.u64 %i, %i, %first;
BYTES:
    setp.ge.u64 %p, %i, %bytes;
    @%p bra DONE;
    add.u64 %s, %from, %i;
    add.u64 %d, %to, %i;
    ld.global.u8 %byte, [%s];
    st.global.u8 [%d], %byte;
    add.u64 %i, %i, %step;
    bra BYTES;
DONE:
    ret;
}}
"""


def driver_copies(
    device: torch.device, addresses: Sequence[int], sizes: Sequence[int], stream: ctypes.c_void_p
) -> Copies | None:
    """A launch that fills the buffers at `addresses`, `sizes` bytes each, on the stream that `stream` points to.

    None where it can't be had: no driver library by the usual name, another vendor's GPUs, too many tensors, several
    large ones (torch's kernel shares its blocks out by size, this one evenly), or a driver that refuses the kernel.
    """
    count, width = len(sizes), blocks_for(sizes)
    room = 1 << (count - 1).bit_length() if count else 0
    kernel = _kernel(device.index or 0, room) if width else None
    if kernel is None:
        return None
    block = ctypes.create_string_buffer(24 * room)
    struct.pack_into(f"{count}Q", block, 0, *addresses)
    struct.pack_into(f"{count}Q", block, 16 * room, *sizes)
    numbers = [ctypes.c_uint(n) for n in (width, count, 1, _THREADS, 1, 1, 0)]
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    # everything is a ctypes object already: nothing is converted at a call
    launch: Callable[[], int] = functools.partial(
        library().cuLaunchKernel, kernel, *numbers, stream, pointers, ctypes.c_void_p()
    )
    return Copies(struct.Struct(f"{count}Q").pack_into, block, 8 * room, launch)


def blocks_for(sizes: Sequence[int]) -> int:
    """Blocks for each tensor of one launch, enough for the largest; 0 where torch's copy does better."""
    if not 0 < len(sizes) <= MOST or (len(sizes) > 1 and sum(sizes) > _MOST_TOGETHER):
        return 0
    wanted = -(-max(sizes) // (16 * _THREADS))
    return max(1, min(wanted, max(_BLOCKS // len(sizes), _LEAST_BLOCKS)))


@functools.cache
def library() -> Any:
    """The driver; None where it is not there."""
    if torch.version.hip is not None:
        return None
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


@functools.cache
def _kernel(device: int, room: int) -> ctypes.c_void_p | None:
    """The kernel for up to `room` tensors, compiled by the driver once per device and kept for the process."""
    driver = library()
    if driver is None:
        return None
    text = _PTX.format(whole=24 * room, from_=8 * room, bytes_=16 * room).encode()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes torch's context current in this thread
        if driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(text)):
            return None
        if driver.cuModuleGetFunction(ctypes.byref(kernel), module, ctypes.c_char_p(b"graphlint_copies")):
            return None
    return kernel
