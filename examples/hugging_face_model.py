"""A Hugging Face image classifier from a local folder: fine-tune it under noise, calibrate, predict.

python examples/hugging_face_model.py [FOLDER IMAGES]

FOLDER is what save_pretrained wrote, IMAGES a folder with one folder of images per class, in the order of the model's labels.
Without them a tiny vision transformer with random weights is made, saved and loaded, and handwritten digits are the images.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

import keepcover
from keepcover.adapters import from_hugging_face
from keepcover.data import Labelled, digits, image_folder
from keepcover.training import fit_under_noise

SIGMA, EPSILON = 0.25, 0.125


def save_tiny_model(folder: Path, names: tuple[str, ...]) -> None:
    """What a folder from the Hugging Face Hub looks like: config.json, model.safetensors, preprocessor_config.json."""
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=3,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        id2label=dict(enumerate(names)),
        label2id={name: k for k, name in enumerate(names)},
    )
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)


def images_of(folder: str, size: tuple[int, int] | None) -> Labelled:
    height = 224 if size is None else size[0]
    return image_folder(folder, resize=height * 8 // 7, crop=height).load()


torch.manual_seed(0)
if len(sys.argv) == 3:
    model = from_hugging_face(sys.argv[1])
    data = images_of(sys.argv[2], model.image_size)
else:
    data = digits()
    data = Labelled(data.name, data.images.expand(-1, 3, -1, -1).contiguous(), data.labels, data.class_names)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder), data.class_names)
        model = from_hugging_face(folder)
print(f"{len(model.class_names)} classes, images of {model.image_size}")
train, calibration, test = data.split(len(data) // 2, len(data) // 3, -1)

# As it comes, a classifier has never seen noise: its sets are valid and useless, and calibrate says so.
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", keepcover.KeepcoverWarning)
    before = keepcover.calibrate(model, calibration.pair, epsilon=EPSILON, sigma=SIGMA, draws=4, seed=0)
for warning in caught:
    print(f"warning: {warning.message}")
print("before fine-tuning:", before.predict(test.images).measure(test.labels))

fit_under_noise(model, *train.pair, sigma=SIGMA, epochs=60)
predictor = keepcover.calibrate(
    model, calibration.pair, alpha=0.1, epsilon=EPSILON, sigma=SIGMA, draws=4, class_names=model.class_names
)
sets = predictor.predict(test.images)
print(sets.guarantee)
print("after fine-tuning: ", sets.measure(test.labels))
