"""NIfTI of other programs: a header is believed as far as its file could hold the claimed values.

nibabel (imported at the first file, since it comes with an extra) takes memory for the claimed
values, and reads all bytes between header and values. So a file's first bytes are looked at here,
and no extension of a header is read.
"""

import gzip
import math
import os
import pathlib
from typing import Any

from loaders.io import files
from loaders.io.files import FileError

MAX_GROWTH = 1032  # by which deflate packs at best: 258 bytes in two bits
MAX_HEADER = 64 << 20  # [bytes] before the values, extensions included


def nifti(path: pathlib.Path) -> Any:
    """Return a NIfTI image whose values are not read yet. Raises FileError, ImportError."""
    import nibabel
    from nibabel.arrayproxy import ArrayProxy

    name = path.name.lower()
    if not name.endswith((".nii", ".nii.gz")):
        raise FileError(f"{path} is no NIfTI file by its name; expected .nii or .nii.gz")
    packed = name.endswith(".gz")
    try:
        with files.regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = (gzip.GzipFile(fileobj=file) if packed else file).read(540)
        lengths = {int.from_bytes(head[:4], order) for order in ("little", "big")}
        kinds: Any = ((348, head[344:348], nibabel.Nifti1Image), (540, head[4:12], nibabel.Nifti2Image))
        magic, kind = next(((magic, kind) for n, magic, kind in kinds if n in lengths), (b"", kinds[0][2]))
        if magic.startswith(b"ni"):
            raise FileError(f"{path} is a header whose values lie in another file; save both as one .nii.gz")
        if not magic.startswith(b"n+"):
            raise FileError(f"{path} does not begin as a NIfTI file does; save the scan again as .nii.gz")
        header: Any = kind.header_class(head[: kind.header_class.template_dtype.itemsize])
        shape, offset = header.get_data_shape(), int(header.get_data_offset())
        if not 0 <= offset <= MAX_HEADER or min(shape, default=0) < 0:
            raise FileError(f"{path} cannot be read: its header claims the shape {shape}, {offset:,} bytes from its beginning")
        claimed, most = offset + math.prod(shape) * header.get_data_dtype().itemsize, size * (MAX_GROWTH if packed else 1)
        if claimed > most:
            holds = f"its {size:,} bytes cannot unpack to more than {most:,}" if packed else f"it has {size:,}"
            raise FileError(f"{path} cannot be read: its header claims {claimed:,} bytes, shape {shape}, and {holds}")
        return kind(ArrayProxy(os.fspath(path), header.copy()), header.get_best_affine(), header)
    except FileError:
        raise
    except Exception as error:  # noqa: BLE001  nibabel and zlib raise what they like for a broken file
        raise FileError(f"{path} cannot be read: {files.said(error)}") from error
