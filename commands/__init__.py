"""The commands of the server's package: serve, gateway, size and others. Imports no torch."""

from tokenpod_client.cli.entries import Entry

#: By name, for the command line: see pyproject.toml, `tokenpod.commands`.
COMMANDS = {
    name: Entry(summary, f"tokenpod.commands.{where}")
    for name, summary, where in (
        ("serve", "Start a server; without a model on the embedded one.", "serve:serve"),
        ("gateway", "Start a server with OpenAI's HTTP API before it.", "gateway:gateway"),
        ("size", "Estimate whether a model fits a device.", "size_flags:size"),
        ("compile", "Compile a model's kernels, without a GPU.", "compile:compile_kernels"),
        ("simulate", "Show what a scheduler would do with a trace.", "simulate:simulate"),
        ("models", "List which architectures are served.", "models:models"),
        ("download", "Download the files of a model that a server reads.", "download:download"),
        ("convert", "Make safetensors of a .bin checkpoint or a GGUF file.", "convert:convert"),
        ("quantize", "Make a quantised checkpoint of a dense one.", "quantize:quantize"),
    )
}
