-- A maker's quarters that differ from its average: a filter above a window above a group.
select i_manufact_id, sum_sales, avg_quarterly_sales
from (
  select
    i_manufact_id, sum(ss_sales_price) as sum_sales,
    avg(sum(ss_sales_price)) over (partition by i_manufact_id) as avg_quarterly_sales
  from store_sales
  join item on i_item_sk = ss_item_sk
  join date_dim on d_date_sk = ss_sold_date_sk
  join store on s_store_sk = ss_store_sk
  where d_month_seq in (
      1200, 1201, 1202, 1203, 1204, 1205, 1206, 1207, 1208, 1209, 1210, 1211)
    and (
      (i_category in ('Books', 'Children', 'Electronics')
        and i_class in ('personal', 'portable', 'reference', 'self-help')
        and i_brand in (
          'scholaramalgamalg #14', 'scholaramalgamalg #7', 'exportiunivamalg #9',
          'scholaramalgamalg #9'))
      or (i_category in ('Women', 'Music', 'Men')
        and i_class in ('accessories', 'classical', 'fragrances', 'pants')
        and i_brand in (
          'amalgimporto #1', 'edu packscholar #1', 'exportiimporto #1', 'importoamalg #1'))
    )
  group by i_manufact_id, d_qoy
) as quarterly
where case when avg_quarterly_sales > 0
  then abs(sum_sales - avg_quarterly_sales) / avg_quarterly_sales end > 0.1
order by avg_quarterly_sales, sum_sales, i_manufact_id
limit 100
