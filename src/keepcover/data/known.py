"""The datasets that keepcover knows: official addresses, files and checksums, names of classes.

The MD5 sums are those their authors publish. They tell a damaged download from a good one; they are no defence against a
forger, which is why nothing is ever unpickled or extracted either.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

from keepcover.errors import InputError

# fmt: off
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy", "bridge",
    "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock", "cloud",
    "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl",
    "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man",
    "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear",
    "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
    "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel",
    "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor", "train",
    "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
)

DIGIT_CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)
# fmt: on


@dataclass(frozen=True)
class File:
    """A file as its authors published it."""

    name: str
    md5: str
    size: int = 0  # bytes, of what is downloaded
    content: str = ""  # MD5 sum of what a compressed file holds: the same however it was compressed

    @property
    def names(self) -> tuple[str, ...]:
        """What it may be called: a single compressed file may have been unpacked."""
        return (self.name, self.name.removesuffix(".gz")) if self.content else (self.name,)


@dataclass(frozen=True)
class Source:
    """One official form of a dataset.

    ``files`` are downloaded from ``address``, into ``folder`` unless they are archives. ``inside`` are the files of an archive
    that hold images; they lie in ``folder``, extracted or not. ``also`` is where another library keeps the files.
    """

    address: str
    folder: str
    files: tuple[File, ...]
    inside: tuple[File, ...] = ()
    also: str = ""

    def places(self, root: Path) -> list[Path]:
        """Where the downloaded files belong under a folder of data."""
        return [root / file.name if self.inside else root / self.folder / file.name for file in self.files]

    def homes(self, root: Path) -> list[Path]:
        """The folders in which files may lie, the most likely one first; ``root`` may be that folder itself."""
        return [root / folder for folder in (self.folder, self.also) if folder] + [root]


_MOST = 2**26  # bytes that a single compressed file may hold; the largest official one holds 47 million

_TORONTO = "https://www.cs.toronto.edu/~kriz/"

SOURCES: dict[str, dict[str, Source]] = {
    "cifar10": {
        "binary": Source(
            _TORONTO,
            "cifar-10-batches-bin",
            (File("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171),),
            (
                File("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25"),
                File("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692"),
                File("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421"),
                File("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb"),
                File("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d"),
                File("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d"),
            ),
        ),
        "python": Source(
            _TORONTO,
            "cifar-10-batches-py",
            (File("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", 170_498_071),),
            (
                File("data_batch_1", "c99cafc152244af753f735de768cd75f"),
                File("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
                File("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
                File("data_batch_4", "634d18415352ddfa80567beed471001a"),
                File("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
                File("test_batch", "40351d587109b95175f43aff81a1287e"),
            ),
        ),
    },
    "cifar100": {
        "binary": Source(
            _TORONTO,
            "cifar-100-binary",
            (File("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", 168_513_733),),
            (
                File("train.bin", "6172c7755cfe09b2fe270c85cebc1b15"),
                File("test.bin", "4499cfba6c016c1be1438163640a0898"),
            ),
        ),
        "python": Source(
            _TORONTO,
            "cifar-100-python",
            (File("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),),
            (File("train", "16019d7e3df5f24257cddd939b257f8d"), File("test", "f0ef6b0ae62326f3e7ffdfab6717acfc")),
        ),
    },
    "mnist": {
        "binary": Source(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "mnist",
            (
                File(
                    "train-images-idx3-ubyte.gz",
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    9_912_422,
                    "6bbc9ace898e44ae57da46a324031adb",
                ),
                File(
                    "train-labels-idx1-ubyte.gz",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    28_881,
                    "a25bea736e30d166cdddb491f175f624",
                ),
                File(
                    "t10k-images-idx3-ubyte.gz",
                    "9fb629c4189551a2d022fa330f9573f3",
                    1_648_877,
                    "2646ac647ad5339dbf082846283269ea",
                ),
                File(
                    "t10k-labels-idx1-ubyte.gz",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                    4_542,
                    "27ae3e4e09519cfbb04c329615203637",
                ),
            ),
            also="MNIST/raw",
        )
    },
    "fashion-mnist": {
        "binary": Source(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "fashion-mnist",
            (
                File(
                    "train-images-idx3-ubyte.gz",
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    26_421_880,
                    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                ),
                File(
                    "train-labels-idx1-ubyte.gz",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    29_515,
                    "9018921c3c673c538a1fc5bad174d6f9",
                ),
                File(
                    "t10k-images-idx3-ubyte.gz",
                    "bef4ecab320f06d8554ea6380940ec79",
                    4_422_102,
                    "8181f5470baa50b63fa0f6fddb340f0a",
                ),
                File(
                    "t10k-labels-idx1-ubyte.gz",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                    5_148,
                    "15d484375f8d13e6eb1aabb0c3f46965",
                ),
            ),
            also="FashionMNIST/raw",
        )
    },
}

CLASSES = {
    "cifar10": CIFAR10_CLASSES,
    "cifar100": CIFAR100_CLASSES,
    "mnist": DIGIT_CLASSES,
    "fashion-mnist": FASHION_CLASSES,
}


def source_of(name: str, form: str = "binary") -> Source:
    """One form of one dataset, or an error that lists what there is."""
    if name not in SOURCES:
        raise InputError(f"expected a dataset among {', '.join(SOURCES)}, got {name!r}")
    if form not in SOURCES[name]:
        raise InputError(f"{name} comes in the form {' or '.join(SOURCES[name])}, not {form!r}")
    return SOURCES[name][form]


def md5_of(path: Path) -> str:
    """The MD5 sum of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def official_md5(path: Path, file: File) -> tuple[str, str]:
    """The sum that says whether this is the official file, and what it should be: that of the content where it is known."""
    if not file.content:
        return md5_of(path), file.md5
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            digest = hashlib.md5(stream.read(_MOST), usedforsecurity=False)
            return digest.hexdigest() if not stream.read(1) else "", file.content
    except (OSError, EOFError, zlib.error):
        return "", file.content


def owner_of(md5: str) -> str | None:
    """Which official file has this sum: to say what a file is when it is not what was asked for."""
    for name, forms in SOURCES.items():
        for source in forms.values():
            for file in (*source.files, *source.inside):
                if md5 in (file.md5, file.content or file.md5):
                    return f"{file.name} of {name}"
    return None


def check_md5(path: Path, found: str, expected: str) -> None:
    """Refuse a file that is not the official one."""
    if found != expected:
        other = owner_of(found)
        what = f"it is {other}" if other else "it is damaged or was made by someone else"
        raise InputError(
            f"{path} has the MD5 sum {found}, the official file has {expected}: {what}. Download it again; in Python, "
            "verify=False reads a file that you made yourself"
        )
