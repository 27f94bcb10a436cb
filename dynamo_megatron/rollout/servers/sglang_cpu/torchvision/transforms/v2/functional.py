from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name: str) -> type:
    from torchvision import placeholder

    return placeholder(name)
