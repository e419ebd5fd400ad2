"""Networks for images from timm and torchvision."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models.entry import Entry, Parts, Size, entry, package

ENTRIES: list[Entry] = []


def _labelled(size: Size, side: int) -> dict[str, Tensor]:
    """Images with one label each."""
    images = torch.randn(size.batch, 3, side, side)
    return {"x": images, "y": torch.randint(0, 10, (size.batch,))}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of one label for each example."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _timm(name: str, *, side: int = 64, compiled: bool = False, **options: Any) -> None:
    @entry(ENTRIES, "timm", name, compiled=compiled)
    def build(size: Size) -> Parts:
        model = package("timm").create_model(name, pretrained=False, num_classes=10, **options).train()
        return Parts(model, lambda: _labelled(size, side), _loss)


_timm("resnet18", compiled=True)
_timm("resnext26ts")
_timm("seresnet18")
_timm("resnest14d")
_timm("efficientnet_b0", compiled=True)
_timm("efficientnetv2_rw_t")
_timm("mobilenetv3_small_100", compiled=True)
_timm("mnasnet_small")
_timm("ghostnet_050")
_timm("regnetx_002")
_timm("regnety_002")
_timm("densenet121")
_timm("vgg11", side=32)
_timm("dla34")
_timm("hrnet_w18_small")
_timm("convnext_atto")
_timm("convmixer_768_32", side=32)
_timm("repvgg_a0")
_timm("nfnet_f0", side=32)
_timm("nf_regnet_b0")
_timm("mixer_s32_224", side=224)
_timm("resmlp_12_224", side=224)
_timm("gmixer_12_224", side=224)
_timm("vit_tiny_patch16_224", side=64, img_size=64, compiled=True)
_timm("deit_tiny_patch16_224", side=64, img_size=64)
_timm("cait_xxs24_224", side=64, img_size=64, depth=6)
_timm("xcit_nano_12_p16_224", side=64, img_size=64)
_timm("pit_ti_224", side=224)
_timm("coat_lite_tiny", side=64, img_size=64)
_timm("convit_tiny", side=64, img_size=64, depth=6)
_timm("crossvit_tiny_240", side=240)
_timm("levit_128s", side=224)
_timm("maxvit_rmlp_pico_rw_256", side=64, img_size=64)
_timm("swin_tiny_patch4_window7_224", side=56, img_size=56)
_timm("twins_svt_small", side=64, img_size=64)
_timm("tnt_s_patch16_224", side=64, img_size=64)
_timm("mobilevitv2_050", side=64)
_timm("edgenext_xx_small", side=64)
_timm("efficientformer_l1", side=224)
_timm("visformer_tiny", side=224)
_timm("eva02_tiny_patch14_224", side=56, img_size=56, depth=4)


def _torchvision(name: str, *, side: int = 64, compiled: bool = False, **options: Any) -> None:
    @entry(ENTRIES, "torchvision", f"{name} of torchvision", compiled=compiled)
    def build(size: Size) -> Parts:
        model = getattr(package("torchvision.models"), name)(weights=None, num_classes=10, **options).train()
        return Parts(model, lambda: _labelled(size, side), _loss)


_torchvision("resnet18", compiled=True)
_torchvision("mobilenet_v2")
_torchvision("mobilenet_v3_small")
_torchvision("shufflenet_v2_x0_5")
_torchvision("squeezenet1_1")
_torchvision("swin_t")
_torchvision("vit_b_32", side=64, image_size=64)
_torchvision("maxvit_t", side=224)


def _segmentation(name: str, **options: Any) -> None:
    @entry(ENTRIES, "torchvision", name)
    def build(size: Size) -> Parts:
        make = getattr(package("torchvision.models.segmentation"), name)
        model = make(weights=None, weights_backbone=None, num_classes=5, **options).train()

        def make_batch() -> dict[str, Tensor]:
            images = torch.randn(size.batch, 3, size.image, size.image)
            return {"x": images, "y": torch.randint(0, 5, (size.batch, size.image, size.image))}

        def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch["x"])["out"], batch["y"])

        return Parts(model, make_batch, loss_of)


_segmentation("fcn_resnet50")
_segmentation("deeplabv3_mobilenet_v3_large")
_segmentation("lraspp_mobilenet_v3_large")


def _detection(name: str) -> None:
    @entry(ENTRIES, "torchvision: detection", name)
    def build(size: Size) -> Parts:
        make = getattr(package("torchvision.models.detection"), name)
        side = 2 * size.image
        sizes = {} if "ssd" in name else {"min_size": side, "max_size": side}
        model = make(weights=None, weights_backbone=None, num_classes=5, **sizes).train()

        def make_batch() -> dict[str, list[Tensor]]:
            corners = torch.rand(2, 3, 2) * side / 2
            boxes = torch.cat([corners, corners + torch.rand(2, 3, 2) * side / 3 + 4], -1)
            return {
                "images": list(torch.rand(2, 3, side, side)),
                "boxes": list(boxes),
                "labels": list(torch.randint(1, 5, (2, 3))),
            }

        def loss_of(model: nn.Module, batch: dict[str, list[Tensor]]) -> Tensor:
            pairs = zip(batch["boxes"], batch["labels"], strict=True)
            targets = [{"boxes": boxes, "labels": labels} for boxes, labels in pairs]
            return torch.stack(list(model(batch["images"], targets).values())).sum()

        return Parts(model, make_batch, loss_of)


_detection("fasterrcnn_mobilenet_v3_large_320_fpn")
_detection("retinanet_resnet50_fpn")
_detection("ssdlite320_mobilenet_v3_large")


@entry(ENTRIES, "torchvision", "video ResNet")
def _video(size: Size) -> Parts:
    model = package("torchvision.models.video").r3d_18(weights=None, num_classes=10).train()

    def make_batch() -> dict[str, Tensor]:
        return {"x": torch.randn(2, 3, 8, 32, 32), "y": torch.randint(0, 10, (2,))}

    return Parts(model, make_batch, _loss)
