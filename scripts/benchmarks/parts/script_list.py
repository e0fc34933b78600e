"""Public training scripts that ``bench_scripts.py`` runs; none of their code is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CLM = "transformers/examples/pytorch/language-modeling"
TEXT = "--train_file {data}/text.txt --tokenizer_name {data}/tokenizer"


@dataclass(frozen=True)
class Script:
    """A training script, and how to run it.

    Attributes:
        name: for people.
        repository: where to get the checkout, ``OWNER/NAME`` on GitHub.
        folder: where to run it, inside the folder of checkouts.
        command: its arguments; ``{data}`` is the folder of synthetic data.
        gib: what it may use, in GiB: the answer is then between ten and a few thousand.
        options: further ones of ``batchfinder run``.
        environment: variables for the script.
        device: where to train, if not everywhere: on the counting runtime values are noise.
        links: files to link into ``folder``, by the names that the script expects there.
    """

    name: str
    repository: str
    folder: str
    command: str
    gib: float
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    device: str = ""


SCRIPTS = (
    Script(
        "nanoGPT",
        "karpathy/nanoGPT",
        "nanoGPT",
        "python train.py config/train_shakespeare_char.py --dataset=tiny --compile=False"
        " --eval_iters=1 --batch_size={batch_size} --out_dir={scratch}",
        8,
        links={"data/tiny": "tokens"},
    ),
    Script(
        "minGPT chargpt",
        "karpathy/minGPT",
        "minGPT/projects/chargpt",
        # It reads values as Python's: a path is a string only with quotes of its own.
        "python chargpt.py --trainer.batch_size={batch_size} --trainer.num_workers=1"
        " --system.work_dir=\\'{scratch}\\'",
        2,
        environment={"PYTHONPATH": "../.."},
        links={"input.txt": "text.txt"},
        device="cpu",
    ),
    Script(
        "PyTorch mnist",
        "pytorch/examples",
        "examples/mnist",
        "python main.py --batch-size {batch_size}",
        1.5,
        links={"../data": "."},
    ),
    Script(
        "PyTorch vae",
        "pytorch/examples",
        "examples/vae",
        "python main.py --batch-size {batch_size}",
        0.6,
        links={"../data": ".", "results": "results"},
    ),
    Script(
        "PyTorch dcgan (two optimizers)",
        "pytorch/examples",
        "examples/dcgan",
        "python main.py --dataset folder --dataroot {data}/images/train --accel --workers 1"
        " --batchSize {batch_size} --outf {scratch}",
        2,
    ),
    Script(
        "PyTorch word_language_model (no optimizer)",
        "pytorch/examples",
        "examples/word_language_model",
        "python main.py --accel --model Transformer --data {data}/words --save {scratch}/model.pt"
        " --batch_size {batch_size}",
        3,
    ),
    Script(
        "PyTorch imagenet",
        "pytorch/examples",
        "examples/imagenet",
        "python main.py --dummy -a resnet18 -j 1 -b {batch_size}",
        4,
    ),
    Script(
        "timm train.py",
        "huggingface/pytorch-image-models",
        "pytorch-image-models",
        "python train.py --data-dir {data}/images --model resnet18 --num-classes 4 --workers 1"
        " --batch-size {batch_size} --output {scratch}",
        4,
    ),
    Script(
        "Transformers run_clm.py (Trainer)",
        "huggingface/transformers",
        CLM,
        f"python run_clm.py --model_type gpt2 {TEXT} --do_train --block_size 128"
        " --config_overrides n_embd=256,n_layer=4,n_head=4"
        " --per_device_train_batch_size {batch_size} --output_dir {scratch} --report_to none",
        3,
    ),
    Script(
        "TRL sft.py",
        "huggingface/trl",
        "trl",
        "python trl/scripts/sft.py --model_name_or_path {data}/model --dataset_name {data}/chats"
        " --max_length 64 --packing --num_train_epochs 20 --eos_token [end] --use_cpu --bf16 False"
        " --per_device_train_batch_size {batch_size} --output_dir {scratch} --report_to none",
        1.35,
        device="cpu",
    ),
    Script(
        "diffusers train_unconditional.py",
        "huggingface/diffusers",
        "diffusers/examples/unconditional_image_generation",
        "accelerate launch --num_processes 1 train_unconditional.py"
        " --train_data_dir {data}/images/train --resolution 32 --train_batch_size {batch_size}"
        " --output_dir {scratch} --logger tensorboard",
        6,
    ),
    Script(
        "Ultralytics YOLO",
        "ultralytics/ultralytics",
        "ultralytics",
        "yolo detect train model=yolov8n.yaml data={data}/boxes/data.yaml imgsz=160"
        " batch={batch_size} workers=1 plots=False amp=False val=False epochs=1000"
        " project={scratch}",
        2,
        environment={"YOLO_CONFIG_DIR": "{scratch}", "YOLO_AUTOINSTALL": "false"},
        device="cpu",
    ),
    Script(
        "Lightning-Hydra template",
        "ashleve/lightning-hydra-template",
        "lightning-hydra-template",
        "python src/train.py trainer=gpu trainer.max_epochs=100 test=False callbacks=none"
        " data.batch_size={batch_size} paths.data_dir={data}/ paths.log_dir={scratch}",
        0.6,
    ),
)
