"""Write the encoder for torchvision, timm, Hugging Face or ONNX.

Writes the encoder of a run's newest good checkpoint, or of --step: the weights without the projection head,
in float32, and a JSON with the config, the normalization, the image size, the sha256 and the results. A
fine-tuned encoder keeps its classifier. docs/export.md shows how to load each format.

  torchvision  RUN/export/torchvision.pth  state_dict for torchvision.models
  timm         RUN/export/timm.pth         state_dict for timm.create_model
  safetensors  RUN/export/safetensors      folder for timm and Hugging Face
  onnx         RUN/export/onnx.onnx        needs onnx onnxscript onnxruntime

`fastsuncet train` does this at the end of a run for the formats in checkpoint.export. An export replaces
the earlier one in RUN/export in one step. What is at --output stays, unless --force is given.

examples:
  fastsuncet export runs/in1k_10pct --to torchvision
  fastsuncet export in1k_10pct --to safetensors --output ~/hub/in1k_10pct
  fastsuncet export runs/in1k_10pct/finetune/10pct --to onnx --step 9000
"""

from fastsuncet.cli._parser import Options, Parser, run_folder, whole


def arguments(parser: Parser) -> None:
    formats = ("torchvision", "timm", "safetensors", "onnx")
    parser.takes("--to", "FORMAT", f"{', '.join(formats)} (required)", required=True, choices=formats)
    parser.writes("the file or folder (default: one in RUN/export)", "PATH", force=True, required=False)
    parser.takes("--step", "N", "this checkpoint of the run (default: the newest)", type=whole(0))
    parser.takes_config("RUN or CONFIG", kind="the folder of a run or a fine-tuning; or ")


def run(parser: Parser, options: Options) -> None:
    where = run_folder(vars(options).pop("name"), vars(options).pop("overrides"))
    from fastsuncet.commands.export import export

    export(where, **vars(options))
