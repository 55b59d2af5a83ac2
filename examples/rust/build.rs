//! Makes the code of the messages from the protos; protoc must be installed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let protos = "../../protos";
    tonic_prost_build::configure().build_server(false).compile_protos(
        &[format!("{protos}/tokenpod/v1/generation_service.proto")],
        &[protos.to_string()],
    )?;
    Ok(())
}
