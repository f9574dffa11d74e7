import org.apache.spark.sql.classic.Dataset;
import org.apache.spark.sql.classic.Dataset$;
import org.apache.spark.sql.classic.SparkSession;
import org.apache.spark.sql.execution.datasources.FileFormat;
import org.apache.spark.sql.execution.datasources.HadoopFsRelation;
import org.apache.spark.sql.execution.datasources.LogicalRelation;
import org.apache.spark.sql.execution.datasources.LogicalRelation$;

/** Makes frames that read slot files through `SlotFileFormat`. */
public class SlotFrames {
  private FileFormat format;

  /** Takes the format of slot files. */
  public void use(FileFormat given) {
    format = given;
  }

  /** Returns the rows of slot files, given a frame that lists them as if they were Parquet. */
  public Dataset of(SparkSession session, Dataset read) {
    LogicalRelation given = (LogicalRelation) read.queryExecution().analyzed();
    HadoopFsRelation files = (HadoopFsRelation) given.relation();
    HadoopFsRelation slots =
        new HadoopFsRelation(
            files.location(),
            files.partitionSchema(),
            files.dataSchema(),
            files.bucketSpec(),
            format,
            files.options(),
            files.sparkSession());
    return Dataset$.MODULE$.ofRows(session, LogicalRelation$.MODULE$.apply(slots, false));
  }
}
